from cluster.membership import Membership
from router.membership import WorkerMember


def member(worker_id="prefill-0", incarnation=1, address="h:1", pool="prefill"):
    return WorkerMember(worker_id=worker_id, incarnation=incarnation, address=address, pool=pool)


def test_a_second_announcement_of_the_same_start_changes_nothing():
    membership = Membership()

    assert membership.announce(member())
    assert not membership.announce(member())
    assert membership.members == (member(),)


def test_a_restart_replaces_the_old_start():
    membership = Membership()
    membership.announce(member())
    membership.announce(member(worker_id="decode-0", pool="decode"))

    assert membership.announce(member(incarnation=2, address="h:2"))
    assert membership.members == (
        member(worker_id="decode-0", pool="decode"),
        member(incarnation=2, address="h:2"),
    )


def test_who_has_announced_itself_is_known():
    membership = Membership()
    membership.announce(member())

    assert "prefill-0" in membership
    assert "prefill-1" not in membership
