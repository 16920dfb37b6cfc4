"""The shape of a page, and the identity that two workers must share to exchange pages."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """A page: `page_size` token slots of all layers, contiguous, head-major.

    Shape of a page: [num_layers, 2, num_kv_heads, page_size, head_dim]; index 0 of the second
    dimension is K, 1 is V. A pool is [num_pages, *page_shape].
    """

    num_layers: int
    num_kv_heads: int
    page_size: int  # token slots
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    model_fingerprint: str  # identity of weights and configuration

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "page_size", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        num_layers, two, num_kv_heads, page_size, head_dim = self.page_shape
        elements = num_layers * two * num_kv_heads * page_size * head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """Return one line that is equal exactly when two workers can exchange pages."""
        shape = "x".join(map(str, self.page_shape))
        return f"pages-v1 {shape} {self.dtype} {self.model_fingerprint}"


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Return how many pages hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
