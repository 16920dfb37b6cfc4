import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kv_cache.radix_tree import RadixNode, RadixTree, TreePage
from tests.support.planted_bugs import Right, instead_of


def enter(tree: RadixTree, tokens: list[bytes], salt: bytes = b"", first_id: int = 0) -> list[int]:
    """Enter what the tree lacks of a prefix; returns the page ids of the whole prefix."""
    path = tree.match(tokens, salt)
    parent = path[-1] if path else None
    new = range(len(path), len(tokens))
    if new:
        path += tree.insert(
            parent,
            page_ids=[first_id + index for index in new],
            page_tokens=tokens[len(path) :],
            page_hashes=[b"" for _ in new],  # all equal: the tree must not rely on hashes
            is_ready=True,
            salt=salt,
        )
    for page in path:
        tree.offer(page.page_id)
    return [page.page_id for page in path]


def everything(page_id: int) -> bool:
    return True


def ids(pages: list[TreePage]) -> list[int]:
    return [page.page_id for page in pages]


def test_run_is_split_where_prefixes_part() -> None:
    tree = RadixTree()
    enter(tree, [b"a", b"b", b"c", b"d"])
    enter(tree, [b"a", b"b", b"x"], first_id=10)

    upper = tree.lookup(0)
    assert upper is not None
    assert ids(upper.node.run) == [0, 1]
    assert {key: ids(child.run) for key, child in upper.node.children.items()} == {
        b"c": [2, 3],
        b"x": [12],
    }
    assert all(child.parent is upper.node for child in upper.node.children.values())
    assert ids(tree.match([b"a", b"b", b"c", b"y"])) == [0, 1, 2]
    assert ids(tree.match([b"a", b"b", b"x", b"y"])) == [0, 1, 12]
    tree.check_integrity(everything)


def test_match_ends_inside_a_run() -> None:
    tree = RadixTree()
    enter(tree, [b"a", b"b", b"c"])
    assert ids(tree.match([b"a", b"b"])) == [0, 1]
    assert ids(tree.match([])) == []
    assert ids(tree.match([b"b"])) == []


def test_salts_do_not_see_each_other() -> None:
    tree = RadixTree()
    enter(tree, [b"a"], salt=b"one")
    assert tree.match([b"a"], b"two") == []
    assert tree.match([b"a"]) == []
    enter(tree, [b"a"], salt=b"two", first_id=5)
    assert ids(tree.match([b"a"], b"two")) == [5]
    assert ids(tree.evict(2, everything)) == [0, 5]
    assert len(tree) == 0
    tree.check_integrity(everything)


def test_pages_of_one_salt_go_in_their_own_order_and_no_others() -> None:
    tree = RadixTree()
    enter(tree, [b"a", b"b"], salt=b"one")
    enter(tree, [b"a"], salt=b"two", first_id=10)
    enter(tree, [b"x"], salt=b"one", first_id=20)
    tree.match([b"a", b"b"], b"one")

    assert ids(tree.evict(2, everything, salt=b"one")) == [20, 1]
    assert tree.evict(5, everything, salt=b"nobody") == []
    tree.check_integrity(everything)
    assert ids(tree.evict(5, everything)) == [10, 0]
    assert tree.evict(0, everything) == []


def test_above_crosses_nodes() -> None:
    tree = RadixTree()
    enter(tree, [b"a", b"b"])
    enter(tree, [b"a", b"x"], first_id=10)
    page = tree.lookup(11)
    assert page is not None
    above = tree.above(page)
    assert above is not None
    assert above.page_id == 0
    assert tree.above(above) is None


def test_leaves_go_from_their_tails_least_recently_used_first() -> None:
    tree = RadixTree()
    enter(tree, [b"a", b"b", b"c"])
    enter(tree, [b"a", b"x", b"y"], first_id=10)
    tree.match([b"a", b"b", b"c"])

    assert ids(tree.evict(10, everything)) == [12, 11, 2, 1, 0]


def test_eviction_skips_pages_that_are_held_and_finds_them_when_offered() -> None:
    tree = RadixTree()
    enter(tree, [b"a", b"b"])
    enter(tree, [b"x", b"y"], first_id=10)
    held = {1}

    assert ids(tree.evict(10, lambda page_id: page_id not in held)) == [11, 10]
    held.clear()
    assert tree.evict(10, everything) == []
    tree.offer(0)  # not the end of a leaf: no effect
    assert tree.evict(10, everything) == []
    tree.offer(1)
    assert ids(tree.evict(10, everything)) == [1, 0]


def test_prefixes_ten_thousand_nodes_deep_need_no_recursion() -> None:
    tree = RadixTree()
    depth = 10_000
    parent = None
    for level in range(depth):
        for branch, tokens in enumerate((b"side", b"main")):
            (page,) = tree.insert(
                parent,
                page_ids=[2 * level + branch],
                page_tokens=[tokens],
                page_hashes=[b""],
                is_ready=True,
            )
        parent = page
    for page_id in range(2 * depth):
        tree.offer(page_id)

    assert len(tree.match([b"main"] * depth)) == depth
    tree.check_integrity(everything)
    assert len(tree.evict(2 * depth, everything)) == 2 * depth
    assert len(tree) == 0


def test_thousands_of_evictions_do_not_scan_the_tree() -> None:
    tree = RadixTree()
    num_leaves = 20_000
    for leaf in range(num_leaves):
        enter(tree, [leaf.to_bytes(4, "little")], first_id=leaf)
    asked = 0

    def is_evictable(page_id: int) -> bool:
        nonlocal asked
        asked += 1
        return True

    for _ in range(num_leaves):
        tree.evict(1, is_evictable)
    assert asked <= 2 * num_leaves


class CountedQueues(dict[bytes, list[tuple[int, int, RadixNode]]]):
    """Counts the queues that are looked at."""

    num_looks = 0

    def __getitem__(self, salt: bytes) -> list[tuple[int, int, RadixNode]]:
        self.num_looks += 1
        return super().__getitem__(salt)

    def items(self) -> Any:
        self.num_looks += len(self)
        return super().items()


@pytest.mark.parametrize("salt", [None, b"0"], ids=["any", "one salt"])
def test_an_eviction_looks_at_few_of_many_salts(salt: bytes | None) -> None:
    num_salts, num_each = 1000, 4
    tree = RadixTree()
    for index in range(num_salts * num_each):
        name = b"%d" % (index % num_salts)
        enter(tree, [b"%d" % index], name, first_id=index)
        tree.offer(index)
    tree._queues = queues = CountedQueues(tree._queues)

    evicted = [
        each.page_id for _ in range(2000) for each in tree.evict(1, lambda _: True, salt=salt)
    ]

    assert evicted == (list(range(2000)) if salt is None else [0, 1000, 2000, 3000])
    assert queues.num_looks <= 8 * len(evicted)
    tree.check_integrity(lambda _: True)


def test_evictions_within_a_salt_leave_nothing_behind() -> None:
    tree = RadixTree()
    enter(tree, [b"a"], b"other", first_id=0)
    tree.offer(0)
    for page_id in range(1, 3000):
        enter(tree, [b"%d" % page_id], b"flood", first_id=page_id)
        tree.offer(page_id)
        tree.evict(int(page_id > 10), lambda _: True, salt=b"flood")

    assert len(tree._firsts) < 200
    assert ids(tree.evict(1, lambda _: True)) == [0]


prefix_strategy = st.lists(st.sampled_from([b"a", b"b"]), max_size=6)


Operations = list[tuple[str, list[bytes], bytes]]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "evict", "evict of salt", "hold"]),
        prefix_strategy,
        st.sampled_from([b"", b"salt"]),
    ),
    max_size=40,
)
SETTINGS = settings(derandomize=True, database=None, max_examples=500)


@SETTINGS
@given(OPERATIONS)
def test_tree_agrees_with_a_dictionary(operations: Operations) -> None:
    compare_with_a_dictionary(operations)


def compare_with_a_dictionary(operations: Operations) -> None:
    tree = RadixTree()
    oracle: dict[tuple[bytes, tuple[bytes, ...]], int] = {}
    held: set[int] = set()  # prefix-closed, as sequences hold pages
    next_id = 0

    def is_evictable(page_id: int) -> bool:
        return page_id not in held

    for kind, tokens, salt in operations:
        expected: list[int] = []
        while (key := (salt, tuple(tokens[: len(expected) + 1]))) in oracle:
            if len(expected) == len(tokens):
                break
            expected.append(oracle[key])
        if kind in ("evict", "evict of salt"):
            among = None if kind == "evict" else salt
            victim = next_victim(tree, is_evictable, among)
            evicted = ids(tree.evict(1, is_evictable, salt=among))
            assert evicted == ([] if victim is None else [victim])
            oracle = {key: page_id for key, page_id in oracle.items() if page_id not in evicted}
        else:
            assert ids(tree.match(tokens, salt)) == expected
        if kind == "insert":
            page_ids = enter(tree, tokens, salt, first_id=next_id)
            next_id += len(tokens)
            for count, page_id in enumerate(page_ids, start=1):
                oracle[salt, tuple(tokens[:count])] = page_id
        if kind == "hold":
            freed = held - set(expected)
            held = set(expected)
            for page_id in freed:
                tree.offer(page_id)
        tree.check_integrity(is_evictable)
        assert {page.page_id for page in tree} == set(oracle.values())


def next_victim(tree: RadixTree, is_evictable: object, salt: bytes | None = None) -> int | None:
    """Find the least recently used evictable leaf by looking at all pages."""
    assert callable(is_evictable)
    ends: list[RadixNode] = [
        page.node
        for page in tree
        if page.node.run[-1] is page and not page.node.children and is_evictable(page.page_id)
        if salt in (None, page.node.salt)
    ]
    if not ends:
        return None
    return min(ends, key=lambda node: (node.last_used, node.serial)).run[-1].page_id


# Planted bugs: each must be found.


def leaf_is_queued_twice(patch: pytest.MonkeyPatch) -> None:
    def enqueue(self: RadixTree, node: RadixNode) -> None:
        node.is_queued = False
        right(self, node)

    right = RadixTree._enqueue
    patch.setattr(RadixTree, "_enqueue", enqueue)


def leaf_used_while_queued_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def evict(
        self: RadixTree,
        num_pages: int,
        is_evictable: Callable[[int], bool],
        *,
        salt: bytes | None = None,
    ) -> object:
        for last_used, _, node in self._queues.get(b"", ()):
            node.last_used = last_used
        return right(self, num_pages, is_evictable, salt=salt)

    right = RadixTree.evict
    patch.setattr(RadixTree, "evict", evict)


def former_first_entries_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RadixTree, "_oldest_salt", lambda self: self._firsts[0][2] if self._firsts else None
    )


@instead_of(RadixTree, "_dequeue")
def a_new_first_entry_is_not_noted(right: Right, self: RadixTree, salt: bytes) -> object:
    firsts = list(self._firsts)
    taken = right(self, salt)
    self._firsts = firsts
    return taken


def emptied_nodes_stay(patch: pytest.MonkeyPatch) -> None:
    def remove(self: RadixTree, page: TreePage) -> RadixNode:
        page.node.run.pop()
        del self._pages[page.page_id]
        return page.node

    patch.setattr(RadixTree, "remove", remove)


def lower_part_of_a_split_is_not_moved(patch: pytest.MonkeyPatch) -> None:
    def split_after(self: RadixTree, page: TreePage) -> RadixNode:
        start = page.node.start
        upper = right(self, page)
        for child in upper.children.values():
            child.start = start
        return upper

    right = RadixTree._split_after
    patch.setattr(RadixTree, "_split_after", split_after)


def match_is_no_use(patch: pytest.MonkeyPatch) -> None:
    def match(self: RadixTree, tokens: list[bytes], salt: bytes = b"") -> list[TreePage]:
        before = {page.node.serial: page.node.last_used for page in self}
        path = right(self, tokens, salt)
        for page in path:
            page.node.last_used = before[page.node.serial]
        return path

    right = RadixTree.match
    patch.setattr(RadixTree, "match", match)


@pytest.mark.parametrize(
    "plant",
    [
        leaf_is_queued_twice,
        leaf_used_while_queued_is_evicted,
        former_first_entries_count,
        a_new_first_entry_is_not_noted,
        emptied_nodes_stay,
        lower_part_of_a_split_is_not_moved,
    ],
    ids=lambda plant: plant.__name__,
)
def test_comparison_finds(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    hunt = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)

    with pytest.raises(AssertionError):
        hunt(given(OPERATIONS)(compare_with_a_dictionary))()


def test_order_of_eviction_is_found_wrong_when_a_match_is_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match_is_no_use(monkeypatch)

    with pytest.raises(AssertionError):
        test_leaves_go_from_their_tails_least_recently_used_first()


def test_matches_survive_random_splits_and_evictions() -> None:
    """Long prefixes over a small alphabet that differ by one page, also at the very end."""
    rng = random.Random(7)
    tree = RadixTree()
    prompts: list[list[bytes]] = []
    for number in range(60):
        base = list(rng.choice(prompts)) if prompts else [b"p"] * 50
        at = rng.randrange(len(base))
        base[at] = rng.choice([b"p", b"q", b"r"])
        prompts.append(base)
        enter(tree, base, first_id=1000 * number)
        tree.evict(rng.randrange(20), everything)
        tree.check_integrity(everything)
        for prompt in prompts:
            path = tree.match(prompt)
            assert [page.tokens for page in path] == prompt[: len(path)]
            if len(path) < len(prompt):
                assert tree.child(path[-1] if path else None, prompt[len(path)]) is None
