"""Maps prefixes to pages: a radix tree whose letters are pages.

    root ── salt "" ── [A B C] ──┬── [D E]          node = run of pages without a branch
                                 └── [F]            child key = all tokens of its first page

Tokens decide, never hashes. One subtree per tenant salt. Runs are split when a sequence leaves in
their middle. The tree knows nothing of reference counts: the caller says which pages may go.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SPARE_FIRSTS = 64  # former first entries that are kept for few queues


@dataclass(eq=False, kw_only=True, slots=True)
class RadixNode:
    """A run of pages without a branch; see the drawing above."""

    parent: "RadixNode | None"  # None: the root
    salt: bytes  # of the subtree; empty at the root as well
    key: bytes  # in parent.children: tokens of the first page, or a salt below the root
    start: int  # depth of the first page
    serial: int  # order of creation
    last_used: int  # time of the tree's own clock; never below that of a child
    run: list["TreePage"] = field(default_factory=list)  # empty only at the root and for salts
    children: dict[bytes, "RadixNode"] = field(default_factory=dict)
    is_queued: bool = False  # its single entry is in the eviction queue


@dataclass(eq=False, kw_only=True, slots=True)
class TreePage:
    """A full page of a prefix."""

    page_id: int
    tokens: bytes  # of this page, packed (kv_cache.page_hash.split_pages)
    page_hash: bytes
    depth: int  # pages before it in its prefix
    is_ready: bool  # False: being computed or received; such pages have no ready page below
    node: RadixNode  # the node whose run holds it


class RadixTree:
    """Prefixes by tokens, and least-recently-used order of the leaves.

    Eviction takes pages from the tails of leaf runs. Invariant: a leaf whose last page was
    announced as evictable (`offer`) is queued once; entries are checked when they come up.
    """

    def __init__(self) -> None:
        self._pages: dict[int, TreePage] = {}  # page_id |-> its place
        self._clock = 0
        self._num_nodes = 0
        # salt |-> heap of (last_used, serial, node), never empty
        self._queues: dict[bytes, list[tuple[int, int, RadixNode]]] = {}
        # Heap of (last_used, serial, salt): the first entry of each queue, and former first ones.
        self._firsts: list[tuple[int, int, bytes]] = []
        self._root = self._new_node(None, b"", 0, b"")

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[TreePage]:
        return iter(self._pages.values())

    def lookup(self, page_id: int) -> TreePage | None:
        """Return the place of a page of the pool, if the tree holds it."""
        return self._pages.get(page_id)

    def match(self, page_tokens: Sequence[bytes], salt: bytes = b"") -> list[TreePage]:
        """Return the pages of the longest common prefix, and mark them as used."""
        path: list[TreePage] = []
        self._clock += 1
        self._root.last_used = self._clock
        node = self._root.children.get(salt)
        while node is not None:
            node.last_used = self._clock
            for page in node.run:
                if len(path) == len(page_tokens) or page.tokens != page_tokens[len(path)]:
                    return path
                path.append(page)
            if len(path) == len(page_tokens):
                return path
            node = node.children.get(page_tokens[len(path)])
        return path

    def child(self, parent: TreePage | None, tokens: bytes, salt: bytes = b"") -> TreePage | None:
        """Return the page with these tokens directly below `parent` (None: at the front)."""
        if parent is None:
            node = self._root.children.get(salt)
        else:
            node = parent.node
            following = parent.depth - node.start + 1
            if following < len(node.run):
                page = node.run[following]
                return page if page.tokens == tokens else None
        below = node.children.get(tokens) if node is not None else None
        return below.run[0] if below is not None else None

    def above(self, page: TreePage) -> TreePage | None:
        """Return the page directly before `page` in its prefix."""
        index = page.depth - page.node.start
        if index:
            return page.node.run[index - 1]
        parent = page.node.parent
        return parent.run[-1] if parent is not None and parent.run else None

    def insert(
        self,
        parent: TreePage | None,
        *,
        page_ids: Sequence[int],
        page_tokens: Sequence[bytes],
        page_hashes: Sequence[bytes],
        is_ready: bool,
        salt: bytes = b"",
    ) -> list[TreePage]:
        """Enter one or more pages, each directly below the one before.

        The first comes directly below `parent` (None: at the front), where no page may equal it.
        """
        assert self._pages.keys().isdisjoint(page_ids), "a page is in the tree already"
        assert self.child(parent, page_tokens[0], salt) is None, "the tree has an equal page"
        depth = 0 if parent is None else parent.depth + 1
        node = self._salt_node(salt) if parent is None else self._split_after(parent)
        if not node.run or node.children:
            node = self._new_node(node, page_tokens[0], depth, node.salt)
        contents = zip(page_ids, page_tokens, page_hashes, strict=True)
        pages = [
            TreePage(
                page_id=page_id,
                tokens=tokens,
                page_hash=page_hash,
                depth=page_depth,
                is_ready=is_ready,
                node=node,
            )
            for page_depth, (page_id, tokens, page_hash) in enumerate(contents, depth)
        ]
        node.run += pages
        self._pages.update(zip(page_ids, pages, strict=True))
        return pages

    def remove(self, page: TreePage) -> RadixNode:
        """Take out a page that has none below it; return the node in which its path ends now."""
        node = page.node
        assert node.run[-1] is page, "only the end of a run can be removed"
        assert not node.children, "only a leaf can be removed"
        node.run.pop()
        del self._pages[page.page_id]
        while not node.run and not node.children and node.parent is not None:
            del node.parent.children[node.key]
            node = node.parent
        return node

    def touch(self, page: TreePage) -> None:
        """Mark the prefix that ends with `page` as just used."""
        self._clock += 1
        node: RadixNode | None = page.node
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def offer(self, page_id: int) -> None:
        """Announce that a page, if it is in the tree, may have become evictable."""
        page = self._pages.get(page_id)
        if page is not None and page.node.run[-1] is page:
            self._enqueue(page.node)

    def evict(
        self, num_pages: int, is_evictable: Callable[[int], bool], *, salt: bytes | None = None
    ) -> list[TreePage]:
        """Take out up to `num_pages` pages, least recently used leaves first, from their tails.

        Args:
            num_pages: How many; 0 or less takes out none.
            is_evictable: Returns whether the page of this id may go.
            salt: The salt whose pages may go; None: any.
        """
        evicted: list[TreePage] = []
        while len(evicted) < num_pages:
            owner = self._oldest_salt() if salt is None else salt
            if owner is None or owner not in self._queues:
                break
            last_used, node = self._dequeue(owner)
            if not node.run or node.children or not is_evictable(node.run[-1].page_id):
                pass  # offered again when that changes
            elif last_used < node.last_used:
                self._enqueue(node)
            else:
                evicted.append(node.run[-1])
                self._enqueue(self.remove(node.run[-1]))  # its next page may go, too
        return evicted

    def check_integrity(self, is_evictable: Callable[[int], bool]) -> None:
        """Assert the invariants of the classes in this file."""
        seen = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            parent = node.parent
            if parent is not None:
                assert parent.children[node.key] is node, "a child does not know its parent"
                assert parent.last_used >= node.last_used, "a child was used after its parent"
                assert node.run or parent is self._root, "an empty run"
                assert node.run or node.children, "a salt without pages"
                assert node.salt == (node.key if parent is self._root else parent.salt)
                assert node.start == parent.start + len(parent.run), "a gap in the depths"
                assert not node.run or parent is self._root or node.key == node.run[0].tokens
            for depth, page in enumerate(node.run, start=node.start):
                assert (page.node, page.depth) == (node, depth), "a page in the wrong place"
                assert self._pages[page.page_id] is page, "a page that lookup does not find"
            ready = [page.is_ready for page in node.run]
            assert ready == sorted(ready, reverse=True), "a ready page below a pending one"
            assert all(ready) or not any(c.run[0].is_ready for c in node.children.values())
            if node.run and not node.children and is_evictable(node.run[-1].page_id):
                assert node.is_queued, "an evictable leaf that eviction does not find"
            seen += len(node.run)
        assert seen == len(self._pages), "lookup finds pages that the tree does not hold"
        assert all(self._queues.values()), "an empty queue"
        firsts = {(*queue[0][:2], salt) for salt, queue in self._queues.items()}
        assert firsts <= set(self._firsts), "a queue that eviction does not find"
        assert len(self._firsts) <= 2 * len(self._queues) + SPARE_FIRSTS, "too many former ones"
        entries = [(salt, each[2]) for salt, queue in self._queues.items() for each in queue]
        assert all(node.salt == salt for salt, node in entries), "a node in another's queue"
        queued = [node.serial for _, node in entries]
        assert len(set(queued)) == len(queued), "a node is queued twice"

    def _salt_node(self, salt: bytes) -> RadixNode:
        return self._root.children.get(salt) or self._new_node(self._root, salt, 0, salt)

    def _new_node(self, parent: RadixNode | None, key: bytes, start: int, salt: bytes) -> RadixNode:
        self._num_nodes += 1
        last_used = 0 if parent is None else parent.last_used
        node = RadixNode(
            parent=parent,
            salt=salt,
            key=key,
            start=start,
            serial=self._num_nodes,
            last_used=last_used,
        )
        if parent is not None:
            parent.children[key] = node
        return node

    def _split_after(self, page: TreePage) -> RadixNode:
        """Return the node whose run ends with `page`, after a split where needed.

        The lower part keeps its identity, and so its children and its place in the queue.
        """
        lower = page.node
        length = page.depth - lower.start + 1
        if length == len(lower.run):
            return lower
        assert lower.parent is not None, "the root has no run"
        upper = self._new_node(lower.parent, lower.key, lower.start, lower.salt)
        upper.last_used = lower.last_used
        upper.run, lower.run = lower.run[:length], lower.run[length:]
        for moved in upper.run:
            moved.node = upper
        lower.parent, lower.key, lower.start = upper, lower.run[0].tokens, lower.start + length
        upper.children[lower.key] = lower
        return upper

    def _enqueue(self, node: RadixNode) -> None:
        if node.run and not node.children and not node.is_queued:
            node.is_queued = True
            queue = self._queues.setdefault(node.salt, [])
            heapq.heappush(queue, (node.last_used, node.serial, node))
            if queue[0][2] is node:
                self._note_first(node.salt)

    def _dequeue(self, salt: bytes) -> tuple[int, RadixNode]:
        """Take the first entry of a queue; return when the node was used, as the entry says."""
        queue = self._queues[salt]
        last_used, _, node = heapq.heappop(queue)
        if not queue:
            del self._queues[salt]
        self._note_first(salt)
        node.is_queued = False
        return last_used, node

    def _note_first(self, salt: bytes) -> None:
        """Note that a queue begins with another entry than before, or has become empty."""
        if queue := self._queues.get(salt):
            heapq.heappush(self._firsts, (*queue[0][:2], salt))
        # Evictions within salts leave former ones behind, which nothing else takes out.
        if len(self._firsts) > 2 * len(self._queues) + SPARE_FIRSTS:
            self._firsts = [(*queue[0][:2], each) for each, queue in self._queues.items()]
            heapq.heapify(self._firsts)

    def _oldest_salt(self) -> bytes | None:
        """Return whose queue begins with the entry used longest ago; None: nothing is queued."""
        while self._firsts:
            last_used, serial, salt = self._firsts[0]
            queue = self._queues.get(salt)
            if queue and queue[0][:2] == (last_used, serial):
                return salt
            heapq.heappop(self._firsts)  # a former one
        return None
