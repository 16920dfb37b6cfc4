from cluster.membership import Membership
from router.membership import WorkerMember


def member(worker_id="prefill-0", incarnation=1, address="h:1", pool="prefill", **fields):
    return WorkerMember(
        worker_id=worker_id, incarnation=incarnation, address=address, pool=pool, **fields
    )


def test_a_second_announcement_of_the_same_start_changes_nothing():
    membership = Membership()

    assert membership.announce(member(), 0.0)
    assert not membership.announce(member(), 0.0)
    assert membership.members == (member(),)


def test_a_restart_replaces_the_old_start():
    membership = Membership()
    membership.announce(member(), 0.0)
    membership.announce(member(worker_id="decode-0", pool="decode"), 0.0)

    assert membership.announce(member(incarnation=2, address="h:2"), 0.0)
    assert membership.members == (
        member(worker_id="decode-0", pool="decode"),
        member(incarnation=2, address="h:2"),
    )


def test_a_start_that_another_one_has_replaced_counts_only_when_that_one_is_silent():
    # Ray has given up a host that cannot be reached, and started its worker elsewhere; then the
    # host is back, and for a moment both announce themselves.
    membership = Membership()
    membership.announce(member(incarnation=1), 0.0)
    membership.announce(member(incarnation=2), 10.0)

    assert not membership.announce(member(incarnation=1), 11.0)
    assert not membership.announce(member(incarnation=2), 12.0)
    assert not membership.announce(member(incarnation=1), 17.9)
    assert [each.incarnation for each in membership.members] == [2]
    assert membership.announce(member(incarnation=1), 18.0), "the new one has ended unseen"
    assert not membership.announce(member(incarnation=2), 19.0), "it is the replaced one now"
    assert [each.incarnation for each in membership.members] == [1]


def test_who_has_announced_itself_is_known():
    membership = Membership()
    membership.announce(member(), 0.0)

    assert "prefill-0" in membership
    assert "prefill-1" not in membership


def draining(membership):
    return {each.worker_id for each in membership.members if each.is_draining}


def test_a_dismissed_worker_is_told_to_the_routers_as_draining_and_known_until_it_has_left():
    membership = Membership()
    membership.announce(member(), 0.0)
    membership.announce(member(worker_id="prefill-1"), 0.0)

    membership.dismiss("prefill-1", 5.0)

    assert draining(membership) == {"prefill-1"}
    assert not membership.left("prefill-1", incarnation=7), "another start of it"
    assert membership.left("prefill-1", incarnation=1)
    assert membership.members == (member(),)
    assert membership.leaving == frozenset()


def test_what_a_start_that_has_left_announces_too_late_is_no_news_and_a_new_start_is():
    membership = Membership()
    membership.announce(member(), 0.0)
    membership.dismiss("prefill-0", 5.0)
    membership.left("prefill-0", incarnation=1)

    assert not membership.announce(member(is_draining=True), 1.0)
    assert membership.members == ()
    assert membership.leaving == frozenset()
    assert membership.gone == {"prefill-0"}

    assert membership.announce(member(incarnation=2), 2.0)
    assert membership.members == (member(incarnation=2),)
    assert membership.gone == frozenset()


def test_an_older_start_that_lives_on_brings_no_worker_back_that_has_left():
    membership = Membership()
    membership.announce(member(incarnation=1), 0.0)
    membership.announce(member(incarnation=2), 1.0)
    membership.dismiss("prefill-0", 5.0)
    membership.left("prefill-0", 2)

    assert not membership.announce(member(incarnation=1), 2.0)
    assert membership.members == ()


def test_a_controller_that_was_started_again_believes_one_that_left_before_it_was_heard_of():
    membership = Membership()

    assert not membership.left("prefill-0", incarnation=1), "nobody knew it"
    assert not membership.announce(member(is_draining=True), 1.0)
    assert membership.members == ()


def test_a_dismissed_worker_that_knows_nothing_of_it_is_told_again():
    membership = Membership()
    membership.announce(member(), 0.0)
    membership.dismiss("prefill-0", 5.0)
    assert membership.grace_of(member()) == 5.0
    assert membership.grace_of(member(is_draining=True)) is None

    membership.announce(member(incarnation=2), 1.0)  # it died and was started again

    assert membership.grace_of(member(incarnation=2)) == 5.0
    assert draining(membership) == {"prefill-0"}


def test_a_controller_that_was_started_again_learns_who_leaves_from_the_workers_themselves():
    membership = Membership()

    assert membership.announce(member(is_draining=True), 0.0)
    assert draining(membership) == {"prefill-0"}
    assert not membership.announce(member(is_draining=True), 2.0), "which is no news"


def test_who_is_silent_is_not_heard_of():
    membership = Membership()
    membership.announce(member(), 1.0)
    membership.announce(member(worker_id="prefill-1"), 4.0)

    membership.dismiss("prefill-1", 5.0)

    assert membership.heard_since(3.0) == {"prefill-1"}
    assert membership.heard_since(0.0) == {"prefill-0", "prefill-1"}
