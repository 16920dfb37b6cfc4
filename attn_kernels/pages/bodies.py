"""Kernel bodies that copy and digest whole pages, seen as 32-bit words."""

import triton
import triton.language as tl


# Ids may begin anywhere in a buffer: that must not cost a compilation in the middle of a transfer.
@triton.jit(do_not_specialize_on_alignment=["target_ids_ptr", "source_ids_ptr"])
def copy_pages_kernel(
    target_ptr,  # [num_target_pages, page_words], int32
    source_ptr,  # [num_source_pages, page_words], int32
    target_ids_ptr,  # [num_copies]; read only if HAS_TARGET_IDS, else copy i goes to page i
    source_ids_ptr,  # [num_copies]; read only if HAS_SOURCE_IDS, else copy i comes from page i
    page_words,
    HAS_TARGET_IDS: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Grid: (num_copies * cdiv(page_words, BLOCK),); blocks of one page are neighbours.
    blocks_per_page = tl.cdiv(page_words, BLOCK)
    my_copy = (tl.program_id(0) // blocks_per_page).to(tl.int64)
    my_target = my_copy
    my_source = my_copy
    if HAS_TARGET_IDS:
        my_target = tl.load(target_ids_ptr + my_copy).to(tl.int64)
    if HAS_SOURCE_IDS:
        my_source = tl.load(source_ids_ptr + my_copy).to(tl.int64)
    words = (tl.program_id(0) % blocks_per_page) * BLOCK + tl.arange(0, BLOCK)
    in_page = words < page_words
    contents = tl.load(source_ptr + my_source * page_words + words, mask=in_page)
    tl.store(target_ptr + my_target * page_words + words, contents, mask=in_page)


@triton.jit(do_not_specialize=["num_digests"], do_not_specialize_on_alignment=["page_ids_ptr"])
def digest_pages_kernel(
    lanes_ptr,  # [num_digests, 2], int64, zero before
    words_ptr,  # [num_pages, page_words], int32
    page_ids_ptr,  # [num_digests], int64
    multipliers_ptr,  # [2, page_words], int64
    num_digests,
    page_words,
    PAGES_PER_PROGRAM: tl.constexpr,  # multipliers are four times a page: read them once for many
    BLOCK: tl.constexpr,
):
    # Grid: (cdiv(page_words, BLOCK), cdiv(num_digests, PAGES_PER_PROGRAM))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_page = offsets < page_words
    multipliers_0 = tl.load(multipliers_ptr + offsets, mask=in_page, other=0)
    multipliers_1 = tl.load(multipliers_ptr + page_words + offsets, mask=in_page, other=0)
    my_first = tl.program_id(1) * PAGES_PER_PROGRAM
    my_end = tl.minimum(my_first + PAGES_PER_PROGRAM, num_digests)
    for index in tl.range(my_first, my_end):
        page = tl.load(page_ids_ptr + index)
        words = tl.load(words_ptr + page * page_words + offsets, mask=in_page, other=0)
        words = words.to(tl.int64)
        # Wrap-around sums have one value in any order, so atomics do no harm.
        lane_0 = tl.sum(words * multipliers_0, 0)
        lane_1 = tl.sum(words * multipliers_1, 0)
        tl.atomic_add(lanes_ptr + index * 2, lane_0, sem="relaxed")
        tl.atomic_add(lanes_ptr + index * 2 + 1, lane_1, sem="relaxed")
