import pytest
import torch

from attn_kernels.append import reference
from attn_kernels.append.launch import rotate_and_append
from tests.attn_kernels.tolerance import assert_within_twice

ATOL = 1e-6  # two units in the last place of float32 for values up to 8


def make_inputs(
    device: str,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rotary_dim: int | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_tokens, page_size = 7, 4
    # Queries, keys and values as a fused projection leaves them: parts of one row per token.
    heads = num_qo_heads + 2 * num_kv_heads
    fused = torch.randn(num_tokens, heads, head_dim, generator=generator).to(device, dtype)
    q, k, v = fused.split([num_qo_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = torch.randn(50, (rotary_dim or head_dim) // 2, generator=generator).to(device)
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "positions": torch.tensor([0, 1, 49, 5, 5, 7, 30], device=device),
        "append_page": torch.tensor([4, 4, 0, 2, 1, -1, 2], device=device),
        "append_offset": torch.tensor([0, 1, 3, 0, 2, 0, 3], device=device),
    }
    pages = torch.full((6, 3, 2, num_kv_heads, page_size, head_dim), 7.0, dtype=dtype)
    return inputs, pages.to(device)


def check(
    q: torch.Tensor,
    pages: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    pages_before: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Compare with torch, which rounds once; return what it makes of the pages."""
    exact = {**inputs, **{name: inputs[name].float() for name in ("q", "k", "v")}}
    exact_pages, rounded_pages = pages_before.clone().float(), pages_before.clone()
    exact_q = reference.rotate_and_append(pages=exact_pages, layer=layer, **exact)
    rounded_q = reference.rotate_and_append(pages=rounded_pages, layer=layer, **inputs)
    assert_within_twice(q, rounded_q, exact_q, atol=ATOL)
    assert_within_twice(pages, rounded_pages, exact_pages, atol=ATOL)
    return rounded_pages


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim"),
    [(4, 2, 16), (5, 1, 32), (3, 3, 96), (8, 1, 128), (2, 1, 256)],
)
def test_rotates_and_writes_only_the_slots_named(
    device: str, num_qo_heads: int, num_kv_heads: int, head_dim: int
):
    inputs, pages = make_inputs(
        device,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
    )
    before = pages.clone()

    q = rotate_and_append(pages=pages, layer=1, **inputs)

    expected_pages = check(q, pages, inputs, before, 1)
    assert torch.equal(pages[:, [0, 2]], expected_pages[:, [0, 2]])
    assert (pages[[3, 5]] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_copied_bit_for_bit_in_half_precision(device: str, dtype: torch.dtype):
    inputs, pages = make_inputs(device, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype)
    before = pages.clone()

    q = rotate_and_append(pages=pages, layer=2, **inputs)

    expected_pages = check(q, pages, inputs, before, 2)
    assert torch.equal(pages[:, :, 1], expected_pages[:, :, 1])


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 4), (32, 16), (64, 48), (80, 32), (96, 96), (128, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dimensions_after_the_rotated_ones_are_copied_bit_for_bit(
    device: str, head_dim: int, rotary_dim: int, dtype: torch.dtype
):
    inputs, pages = make_inputs(
        device,
        num_qo_heads=5,
        num_kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        rotary_dim=rotary_dim,
    )
    before = pages.clone()

    q = rotate_and_append(pages=pages, layer=1, **inputs)

    expected_pages = check(q, pages, inputs, before, 1)
    written = inputs["append_page"] >= 0
    slots = (inputs["append_page"][written], 1, 0, slice(None), inputs["append_offset"][written])
    assert torch.equal(q[..., rotary_dim:], inputs["q"][..., rotary_dim:])
    assert torch.equal(pages[slots][..., rotary_dim:], inputs["k"][written][..., rotary_dim:])
    assert torch.equal(pages[:, :, 1], expected_pages[:, :, 1])
    assert (pages[[3, 5]] == 7.0).all()


def test_a_partial_rotation_is_that_of_a_head_cut_to_the_rotated_dimensions(device: str):
    inputs, pages = make_inputs(
        device, num_qo_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, rotary_dim=32
    )
    cut = {name: inputs[name][..., :32].contiguous() for name in ("q", "k", "v")}
    cut_pages = pages[..., :32].contiguous()

    q = rotate_and_append(pages=pages, layer=0, **inputs)

    assert torch.equal(
        q[..., :32], rotate_and_append(pages=cut_pages, layer=0, **{**inputs, **cut})
    )
    assert torch.equal(pages[..., :32], cut_pages)
