"""Forests of requests that share prefixes, for benchmarks.kernels and benchmarks.cascade_border.

"cascade/B,S,U" is B requests with S tokens in common and U of their own; in "cascade/edge/B,S,U"
sharing hardly pays off, or not at all (benchmarks.cascade_border has many more of these).
"cascade/three-levels..." and those from real prompts (prefix_trees.json, which names its sources)
are deeper.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

TWO_LEVELS = [
    (8, 4096, 1024),
    (16, 8192, 256),
    (32, 2048, 512),
    (64, 8192, 256),
    (256, 8192, 128),
    (64, 32_768, 256),
    (256, 32_768, 256),
]
EDGES = [
    (2, 256, 1024),
    (2, 1024, 256),
    (2, 1024, 1024),
    (3, 512, 512),
    (4, 256, 256),
    (4, 512, 4096),
    (4, 1024, 1024),
    (8, 512, 2048),
    (16, 256, 256),
    (32, 256, 1024),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forest:
    """Prefixes, parents first, and requests below them; lengths in tokens."""

    nodes: list[tuple[int, int]]  # parent (-1: a root) and own tokens, whole pages
    requests: list[tuple[int, int]]  # node (-1: none) and own tokens

    def kv_lens(self) -> list[int]:
        """Return the tokens of each request."""
        ends: list[int] = []
        for parent, num_tokens in self.nodes:
            ends.append((ends[parent] if parent >= 0 else 0) + num_tokens)
        return [(ends[node] if node >= 0 else 0) + own for node, own in self.requests]

    def num_distinct_tokens(self) -> int:
        """Count tokens, shared ones once; nodes without requests count as well."""
        return sum(count for _, count in self.nodes) + sum(own for _, own in self.requests)

    def page_tables(
        self, page_ids: Sequence[int], page_size: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Hand out pages; return each request's first table entry, and the entries."""
        free = iter(page_ids)
        paths: list[list[int]] = []
        for parent, num_tokens in self.nodes:
            own = [next(free) for _ in range(num_tokens // page_size)]
            paths.append([*(paths[parent] if parent >= 0 else []), *own])
        tables = [
            [
                *(paths[node] if node >= 0 else []),
                *(next(free) for _ in range(-(-own // page_size))),
            ]
            for node, own in self.requests
        ]
        starts = np.cumsum([0, *(len(table) for table in tables)])[:-1]
        return starts, np.array([page for table in tables for page in table], dtype=np.int32)


def random_forest(seed: int, page_size: int) -> Forest:
    """Draw a forest of 1 to 64 nodes in up to four levels, and 2 to 256 requests below nodes."""
    rng = random.Random(seed)  # noqa: S311 -- a workload, not a secret
    depth, num_roots = rng.choice((1, 2, 2, 3, 3, 4)), rng.choice((1, 1, 2, 4, 8))
    node_len, own_len = rng.choice((64, 256, 1024, 4096)), rng.choice((32, 128, 512, 2048, 8192))
    nodes: list[tuple[int, int]] = []

    def grow(parent: int) -> int:
        num_pages = int(node_len * rng.lognormvariate(0, 1) / page_size)
        nodes.append((parent, page_size * max(1, num_pages)))
        return len(nodes) - 1

    level = [grow(-1) for _ in range(num_roots)]
    for _ in range(depth - 1):
        below = []
        for parent in level:
            for _ in range(rng.choice((1, 2, 2, 4, 8))):
                if len(nodes) < 64:
                    below.append(grow(parent))
        level = below or level
    num_requests = rng.choice((2, 4, 8, 16, 32, 64, 128, 256))
    where = rng.choice(("leaves", "nodes", "anywhere"))
    is_uneven = rng.random() < 0.5
    places = level if where == "leaves" else list(range(len(nodes)))
    if where == "anywhere":
        places = places + [-1] * max(1, len(nodes) // 2)
    weights = [1 / (rank + 1) if is_uneven else 1.0 for rank in range(len(places))]
    sigma = rng.choice((0.0, 0.5, 1.2))
    requests = []
    for _ in range(num_requests):
        (place,) = rng.choices(places, weights)
        own = int(own_len * rng.lognormvariate(0, sigma))
        requests.append((place, max(1, min(32_768, own))))
    return Forest(nodes=nodes, requests=requests)


def cascade_cases() -> Iterator[tuple[str, Forest]]:
    """Yield named forests."""
    kinds = {"cascade": TWO_LEVELS, "cascade/edge": EDGES}
    for kind, forests in kinds.items():
        for batch, shared, unique in forests:
            forest = Forest(nodes=[(-1, shared)], requests=[(0, unique)] * batch)
            yield f"{kind}/{batch},{shared},{unique}", forest
    for groups, members in ((4, 16), (16, 4)):
        # A system prompt, a document for each group, a conversation for each request
        nodes = [(-1, 2048), *[(0, 4096)] * groups]
        requests = [(1 + group, 512) for group in range(groups) for _ in range(members)]
        forest = Forest(nodes=nodes, requests=requests)
        yield f"cascade/three-levels,2048,{groups}x4096,{groups * members}x512", forest
    trees = json.loads((Path(__file__).parent / "prefix_trees.json").read_text())
    for name, tree in trees.items():
        nodes = [(parent, count) for parent, count in tree["nodes"]]
        requests = [(node, own) for node, own in tree["requests"]]
        yield f"cascade/{name}", Forest(nodes=nodes, requests=requests)
