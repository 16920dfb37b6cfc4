"""Kernel bodies of sampling for rows in which many tokens may be kept: bins, window, draw.

See `attn_kernels.sampling.launch` for the whole and `attn_kernels.sampling.bodies` for the words.
"""

import triton
import triton.language as tl

from attn_kernels.chain import wait_for_launch_before
from attn_kernels.sampling.bodies import (
    BELOW_COUNT,
    BELOW_MASS,
    BINNED,
    CROWDED,
    FIRST_BIN,
    INFINITY,
    LAST_BIN,
    LAST_MASS,
    NUM_FIELDS,
    RANK_BIN,
    RANK_COUNT,
    RANK_MASS,
    SETTLED,
    STATUS,
    TOTAL_MASS,
    UNCUT,
    WINDOW_COUNT,
    highest_cut,
    least_by_min_p,
    load_logits,
    mass_of,
    mass_of_top_k,
    scale_logits,
)
from attn_kernels.sampling.bodies_gumbel import NO_TOKEN, draw_base, improve_draw


@triton.jit
def bin_of(scaled, lowest, NUM_BINS: tl.constexpr):
    """Return the bin of each value, -1 below `lowest`; never falls with the value."""
    bins = ((scaled - lowest) * (NUM_BINS / -lowest)).to(tl.int32)
    return tl.where(scaled >= lowest, tl.minimum(bins, NUM_BINS - 1), -1)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def count_bins_kernel(
    state_ptr,  # [num_rows, NUM_FIELDS], int64
    limits_ptr,  # [num_rows, 2], float32
    bin_count_ptr,  # [num_rows, NUM_BINS], int32; filled for rows with top-k
    bin_mass_ptr,  # [num_rows, NUM_BINS], int64; filled for rows with top-p
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,
    temperature_ptr,  # [num_rows], float64
    top_k_ptr,  # [num_rows], int64
    top_p_ptr,  # [num_rows], float64
    logits_stride,
    mask_stride,
    vocab_size,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
    NUM_BINS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (programs per row, num_rows)
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(1).to(tl.int64)
    my_state_ptr = state_ptr + my_row * NUM_FIELDS
    if tl.load(my_state_ptr + STATUS) == BINNED:
        row_max = tl.load(limits_ptr + my_row * 2)
        lowest = tl.load(limits_ptr + my_row * 2 + 1)
        temperature = tl.load(temperature_ptr + my_row)
        top_k = tl.load(top_k_ptr + my_row)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        has_top_p = tl.load(top_p_ptr + my_row) < 1.0
        below_mass = tl.zeros([], tl.int64)
        below_count = tl.zeros([], tl.int32)
        for first in range(tl.program_id(0) * TILE, vocab_size, tl.num_programs(0) * TILE):
            tokens = first + tl.arange(0, TILE)
            logits = load_logits(
                logits_ptr + my_row * logits_stride,
                mask_ptr + my_row * mask_stride,
                tokens,
                tokens < vocab_size,
                HAS_MASK,
            )
            scaled = scale_logits(logits, row_max, temperature)
            masses = mass_of(scaled)
            bins = bin_of(scaled, lowest, NUM_BINS)
            places = my_row * NUM_BINS + bins
            is_binned = bins >= 0
            is_below = (bins < 0) & (scaled > -INFINITY)
            # Integers: the sums have one value in any order.
            if has_top_k:
                tl.atomic_add(bin_count_ptr + places, 1, mask=is_binned, sem="relaxed")
            if has_top_p:
                tl.atomic_add(bin_mass_ptr + places, masses, mask=is_binned, sem="relaxed")
            below_mass += tl.sum(tl.where(is_below, masses, 0), 0)
            below_count += tl.sum(is_below.to(tl.int32), 0)
        tl.atomic_add(my_state_ptr + BELOW_MASS, below_mass, sem="relaxed")
        tl.atomic_add(my_state_ptr + BELOW_COUNT, below_count.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def choose_window_kernel(
    state_ptr,  # [num_rows, NUM_FIELDS], int64
    bin_count_ptr,  # [num_rows, NUM_BINS], int32
    bin_mass_ptr,  # [num_rows, NUM_BINS], int64
    top_k_ptr,  # [num_rows], int64
    top_p_ptr,  # [num_rows], float64
    NUM_BINS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_rows,)
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(0).to(tl.int64)
    my_state_ptr = state_ptr + my_row * NUM_FIELDS
    if tl.load(my_state_ptr + STATUS) == BINNED:
        top_k = tl.load(top_k_ptr + my_row)
        top_p = tl.load(top_p_ptr + my_row)
        bins = tl.arange(0, NUM_BINS)
        counts = tl.load(bin_count_ptr + my_row * NUM_BINS + bins).to(tl.int64)
        masses = tl.load(bin_mass_ptr + my_row * NUM_BINS + bins)
        num_binned = tl.sum(counts, 0)
        mass_binned = tl.sum(masses, 0)
        num_above = num_binned - tl.cumsum(counts, 0)  # [NUM_BINS]: in all higher bins
        mass_above = mass_binned - tl.cumsum(masses, 0)
        num_tokens = num_binned + tl.load(my_state_ptr + BELOW_COUNT)
        total = mass_binned + tl.load(my_state_ptr + BELOW_MASS)
        has_top_k = (top_k > 0) & (top_k < num_tokens)

        # The bin of the k-th largest, and what mass the k largest have at least and at most.
        rank_bin = tl.zeros([], tl.int32) - 1
        least_mass = total
        largest_mass = total
        if has_top_k:
            rank_bin = tl.min(tl.where(num_above < top_k, bins, NUM_BINS - 1), 0)
            is_rank = bins == rank_bin
            least_mass = tl.sum(tl.where(is_rank, mass_above, 0), 0)
            largest_mass = least_mass + tl.sum(tl.where(is_rank, masses, 0), 0)
            tl.store(my_state_ptr + RANK_COUNT, tl.sum(tl.where(is_rank, num_above, 0), 0))
            tl.store(my_state_ptr + RANK_MASS, least_mass)
        # The bins in which the nucleus may end.
        first = rank_bin
        last = rank_bin
        if top_p < 1.0:
            above = mass_above.to(tl.float64)
            is_in = above < top_p * largest_mass.to(tl.float64)
            first = tl.min(tl.where(is_in, bins, NUM_BINS - 1), 0)
            is_in = above < top_p * least_mass.to(tl.float64)
            last = tl.min(tl.where(is_in, bins, NUM_BINS - 1), 0)
        # The k-th largest may lie below the lowest bin.
        is_lost = has_top_k & (num_binned < top_k)
        tl.store(my_state_ptr + STATUS, tl.where(is_lost, CROWDED, BINNED))
        tl.store(my_state_ptr + RANK_BIN, rank_bin.to(tl.int64))
        tl.store(my_state_ptr + FIRST_BIN, first.to(tl.int64))
        tl.store(my_state_ptr + LAST_BIN, last.to(tl.int64))
        mass_above_last = tl.sum(tl.where(bins == last, mass_above, 0), 0)
        tl.store(my_state_ptr + LAST_MASS, mass_above_last)
        tl.store(my_state_ptr + TOTAL_MASS, total)


@triton.jit(
    do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr", "seed_ptr", "position_ptr"]
)
def draw_kernel(
    score_ptr,  # [num_rows, programs per row], float64: best score of a program's tokens
    score_token_ptr,  # [num_rows, programs per row], int32
    state_ptr,  # [num_rows, NUM_FIELDS], int64
    limits_ptr,  # [num_rows, 2], float32
    candidate_ptr,  # [num_rows, CAPACITY], float32
    candidate_token_ptr,  # [num_rows, CAPACITY], int32
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,
    temperature_ptr,  # [num_rows], float64
    min_p_ptr,  # [num_rows], float64
    seed_ptr,  # [num_rows], int64
    position_ptr,  # [num_rows], int64
    logits_stride,
    mask_stride,
    vocab_size,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_BINS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (programs per row, num_rows)
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(1).to(tl.int64)
    my_state_ptr = state_ptr + my_row * NUM_FIELDS
    status = tl.load(my_state_ptr + STATUS)
    if (status == UNCUT) | (status == BINNED):
        row_max = tl.load(limits_ptr + my_row * 2)
        temperature = tl.load(temperature_ptr + my_row)
        least = least_by_min_p(tl.load(min_p_ptr + my_row))
        base = draw_base(tl.load(seed_ptr + my_row), tl.load(position_ptr + my_row))
        lowest = tl.full([], -1.0, tl.float32)
        rank_bin = tl.zeros([], tl.int32) - 1
        first_bin = rank_bin
        last_bin = rank_bin
        if status == BINNED:
            lowest = tl.load(limits_ptr + my_row * 2 + 1)
            rank_bin = tl.load(my_state_ptr + RANK_BIN).to(tl.int32)
            first_bin = tl.load(my_state_ptr + FIRST_BIN).to(tl.int32)
            last_bin = tl.load(my_state_ptr + LAST_BIN).to(tl.int32)
        best_score = tl.full([], -INFINITY, tl.float64)
        best_token = tl.full([], NO_TOKEN, tl.int32)
        for first in range(tl.program_id(0) * TILE, vocab_size, tl.num_programs(0) * TILE):
            tokens = first + tl.arange(0, TILE)
            logits = load_logits(
                logits_ptr + my_row * logits_stride,
                mask_ptr + my_row * mask_stride,
                tokens,
                tokens < vocab_size,
                HAS_MASK,
            )
            scaled = scale_logits(logits, row_max, temperature)
            is_possible = (scaled > -INFINITY) & (scaled >= least)
            is_kept = is_possible
            if status == BINNED:
                bins = bin_of(scaled, lowest, NUM_BINS)
                is_kept &= bins > last_bin
                in_window = (bins == rank_bin) | ((bins >= first_bin) & (bins <= last_bin))
                in_window &= bins >= 0
                flags = in_window.to(tl.int32)
                num_mine = tl.sum(flags, 0)
                if num_mine > 0:
                    start = tl.atomic_add(
                        my_state_ptr + WINDOW_COUNT, num_mine.to(tl.int64), sem="relaxed"
                    )
                    slots = start + tl.cumsum(flags, 0) - 1
                    places = my_row * CAPACITY + slots
                    fits = in_window & (slots < CAPACITY)
                    tl.store(candidate_ptr + places, scaled, mask=fits)
                    tl.store(candidate_token_ptr + places, tokens, mask=fits)
            best_score, best_token = improve_draw(
                scaled, tokens, is_kept, base, best_score, best_token
            )
        my_place = my_row * tl.num_programs(0) + tl.program_id(0)
        tl.store(score_ptr + my_place, best_score)
        tl.store(score_token_ptr + my_place, best_token)


@triton.jit
def measure_row(
    my_logits_ptr,
    my_mask_ptr,
    vocab_size,
    row_max,
    temperature,
    middle,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Read a row once.

    Returns the lowest value >= middle and the highest below it, and count and mass of the former.
    """
    lowest_upper = tl.full([], INFINITY, tl.float32)
    highest_lower = tl.full([], -INFINITY, tl.float32)
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    for first in range(0, vocab_size, TILE):
        tokens = first + tl.arange(0, TILE)
        logits = load_logits(my_logits_ptr, my_mask_ptr, tokens, tokens < vocab_size, HAS_MASK)
        scaled = scale_logits(logits, row_max, temperature)
        is_upper = (scaled >= middle) & (scaled > -INFINITY)
        lowest_upper = tl.minimum(lowest_upper, tl.min(tl.where(is_upper, scaled, INFINITY), 0))
        lower = tl.where(scaled < middle, scaled, -INFINITY)
        highest_lower = tl.maximum(highest_lower, tl.max(lower, 0))
        count += tl.sum(is_upper.to(tl.int64), 0)
        mass += tl.sum(tl.where(is_upper, mass_of(scaled), 0), 0)
    return lowest_upper, highest_lower, count, mass


@triton.jit
def highest_cut_of_row(
    my_logits_ptr,
    my_mask_ptr,
    vocab_size,
    row_max,
    temperature,
    low,
    target,
    BY_MASS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Do what highest_cut does for all values of a row from `low` on, which reach the target."""
    high = tl.zeros([], tl.float32)
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        lowest_upper, highest_lower, count, mass = measure_row(
            my_logits_ptr, my_mask_ptr, vocab_size, row_max, temperature, middle, HAS_MASK, TILE
        )
        reaches = (mass if BY_MASS else count).to(tl.float64) >= target
        low = tl.where(reaches, lowest_upper, low)
        high = tl.where(reaches, high, highest_lower)
    return low


@triton.jit(
    do_not_specialize=["num_scores"],
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seed_ptr",
        "position_ptr",
    ],
)
def finish_kernel(
    tokens_ptr,  # [num_rows], int32
    score_ptr,  # [num_rows, num_scores], float64
    score_token_ptr,  # [num_rows, num_scores], int32
    state_ptr,  # [num_rows, NUM_FIELDS], int64
    limits_ptr,  # [num_rows, 2], float32
    candidate_ptr,  # [num_rows, CAPACITY], float32
    candidate_token_ptr,  # [num_rows, CAPACITY], int32
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,
    temperature_ptr,  # [num_rows], float64
    top_k_ptr,  # [num_rows], int64
    top_p_ptr,  # [num_rows], float64
    min_p_ptr,  # [num_rows], float64
    seed_ptr,  # [num_rows], int64
    position_ptr,  # [num_rows], int64
    logits_stride,
    mask_stride,
    vocab_size,
    num_scores,
    HAS_MASK: tl.constexpr,
    SCORES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_BINS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_rows,)
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(0).to(tl.int64)
    my_state_ptr = state_ptr + my_row * NUM_FIELDS
    status = tl.load(my_state_ptr + STATUS)
    if (status == BINNED) & (tl.load(my_state_ptr + WINDOW_COUNT) > CAPACITY):
        status = tl.full([], CROWDED, tl.int64)
    if status != SETTLED:
        temperature = tl.load(temperature_ptr + my_row)
        top_k = tl.load(top_k_ptr + my_row)
        top_p = tl.load(top_p_ptr + my_row)
        least = least_by_min_p(tl.load(min_p_ptr + my_row))
        base = draw_base(tl.load(seed_ptr + my_row), tl.load(position_ptr + my_row))
        row_max = tl.load(limits_ptr + my_row * 2)
        best_score = tl.full([], -INFINITY, tl.float64)
        best_token = tl.full([], NO_TOKEN, tl.int32)
        if status != CROWDED:
            scores_index = tl.arange(0, SCORES_PADDED)
            is_score = scores_index < num_scores
            my_place = my_row * num_scores
            scores = tl.load(score_ptr + my_place + scores_index, mask=is_score, other=-INFINITY)
            score_tokens = tl.load(
                score_token_ptr + my_place + scores_index, mask=is_score, other=NO_TOKEN
            )
            best_score = tl.max(scores, 0)
            best_token = tl.min(tl.where(scores == best_score, score_tokens, NO_TOKEN), 0)
        if status == BINNED:
            slots = tl.arange(0, CAPACITY)
            is_member = slots < tl.load(my_state_ptr + WINDOW_COUNT)
            places = my_row * CAPACITY + slots
            scaled = tl.load(candidate_ptr + places, mask=is_member, other=-INFINITY)
            tokens = tl.load(candidate_token_ptr + places, mask=is_member, other=NO_TOKEN)
            bins = bin_of(scaled, tl.load(limits_ptr + my_row * 2 + 1), NUM_BINS)
            masses = mass_of(scaled)
            mass = tl.load(my_state_ptr + TOTAL_MASS)
            rank_bin = tl.load(my_state_ptr + RANK_BIN)
            cut = tl.full([], -INFINITY, tl.float32)
            if rank_bin >= 0:
                in_rank_bin = is_member & (bins == rank_bin)
                count_above = tl.load(my_state_ptr + RANK_COUNT)
                cut = highest_cut(
                    scaled, in_rank_bin.to(tl.int64), in_rank_bin, count_above, top_k.to(tl.float64)
                )
                mass = mass_of_top_k(
                    scaled,
                    masses,
                    in_rank_bin,
                    cut,
                    count_above,
                    tl.load(my_state_ptr + RANK_MASS),
                    top_k,
                )
            if top_p < 1.0:
                first_bin = tl.load(my_state_ptr + FIRST_BIN)
                last_bin = tl.load(my_state_ptr + LAST_BIN)
                in_nucleus_bins = is_member & (bins >= first_bin) & (bins <= last_bin)
                nucleus_cut = highest_cut(
                    scaled,
                    masses,
                    in_nucleus_bins,
                    tl.load(my_state_ptr + LAST_MASS),
                    top_p * mass.to(tl.float64),
                )
                cut = tl.maximum(cut, nucleus_cut)
            is_kept = is_member & (scaled >= cut) & (scaled >= least)
            best_score, best_token = improve_draw(
                scaled, tokens, is_kept, base, best_score, best_token
            )
        if status == CROWDED:
            my_logits_ptr = logits_ptr + my_row * logits_stride
            my_mask_ptr = mask_ptr + my_row * mask_stride
            low, _, count, mass = measure_row(
                my_logits_ptr,
                my_mask_ptr,
                vocab_size,
                row_max,
                temperature,
                -INFINITY,
                HAS_MASK,
                TILE,
            )
            cut = low
            if (top_k > 0) & (top_k < count):
                cut = highest_cut_of_row(
                    my_logits_ptr,
                    my_mask_ptr,
                    vocab_size,
                    row_max,
                    temperature,
                    low,
                    top_k.to(tl.float64),
                    False,
                    HAS_MASK,
                    TILE,
                )
                # Of the tokens that tie at the cut, as many as fit count.
                _, _, num_kept, mass = measure_row(
                    my_logits_ptr,
                    my_mask_ptr,
                    vocab_size,
                    row_max,
                    temperature,
                    cut,
                    HAS_MASK,
                    TILE,
                )
                mass -= (num_kept - top_k) * mass_of(cut)
            if top_p < 1.0:
                cut = highest_cut_of_row(
                    my_logits_ptr,
                    my_mask_ptr,
                    vocab_size,
                    row_max,
                    temperature,
                    cut,
                    top_p * mass.to(tl.float64),
                    True,
                    HAS_MASK,
                    TILE,
                )
            for first in range(0, vocab_size, TILE):
                tokens = first + tl.arange(0, TILE)
                logits = load_logits(
                    my_logits_ptr, my_mask_ptr, tokens, tokens < vocab_size, HAS_MASK
                )
                scaled = scale_logits(logits, row_max, temperature)
                is_kept = (scaled >= cut) & (scaled > -INFINITY)
                is_kept &= scaled >= least
                best_score, best_token = improve_draw(
                    scaled, tokens, is_kept, base, best_score, best_token
                )
        tl.store(tokens_ptr + my_row, best_token)
