"""Kernel bodies of sampling without sorting; `attn_kernels.sampling.launch` tells the whole.

A "scaled" logit is (logit - row's largest) / temperature, as float32: the largest is 0. A mass is
exp(scaled) in units of 2**-40, an int64: sums have one value in any order. The state of a row that
`choose` could not settle is a few int64, by the names below.
"""

import triton
import triton.language as tl

from attn_kernels.chain import wait_for_launch_before
from attn_kernels.sampling.bodies_gumbel import LOG2_E, NO_TOKEN, draw_base, improve_draw

# Fields of a row's state.
STATUS = tl.constexpr(0)
WINDOW_COUNT = tl.constexpr(1)  # candidates in the window
RANK_BIN = tl.constexpr(2)  # bin of the k-th largest, or -1
FIRST_BIN = tl.constexpr(3)  # lowest bin in which the nucleus may end
LAST_BIN = tl.constexpr(4)  # highest one; all above are kept
RANK_COUNT = tl.constexpr(5)  # tokens above RANK_BIN
RANK_MASS = tl.constexpr(6)  # their mass
LAST_MASS = tl.constexpr(7)  # mass above LAST_BIN
TOTAL_MASS = tl.constexpr(8)
BELOW_MASS = tl.constexpr(9)  # of tokens below the lowest bin
BELOW_COUNT = tl.constexpr(10)
NUM_FIELDS = tl.constexpr(16)

# Values of STATUS.
SETTLED = tl.constexpr(0)
UNCUT = tl.constexpr(1)  # neither top-k nor top-p: draw from all that min-p keeps
BINNED = tl.constexpr(2)  # counted in bins
CROWDED = tl.constexpr(3)  # the bins did not help: search the row itself

MASS_UNIT = tl.constexpr(2.0**40)
# Bounds the relative error of the float32 sum of a row's masses: 2**-17.5.
SUM_ERROR = tl.constexpr(2.0**-16)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_logits(logits_ptr, mask_ptr, tokens, is_token, HAS_MASK: tl.constexpr):
    """Load float32 logits of one row; NaN becomes inf, which makes the row invalid."""
    logits = tl.load(logits_ptr + tokens, mask=is_token, other=-INFINITY).to(tl.float32)
    logits = tl.where(logits != logits, INFINITY, logits)
    if HAS_MASK:
        words = tl.load(mask_ptr + (tokens >> 5), mask=is_token, other=0)
        logits = tl.where(((words >> (tokens & 31)) & 1) != 0, logits, -INFINITY)
    return logits


@triton.jit
def scale_logits(logits, row_max, temperature):  # float32, float32, float64
    scaled = logits - row_max
    if temperature != 1.0:
        scaled = (scaled.to(tl.float64) / temperature).to(tl.float32)
    return scaled


@triton.jit
def least_by_min_p(min_p):
    """Return the smallest float32 that is not below log(min_p)."""
    exact = tl.log(min_p)
    rounded = exact.to(tl.float32)
    above = (rounded.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)  # of negatives
    return tl.where(rounded.to(tl.float64) < exact, above, rounded)


@triton.jit
def mass_of(scaled):
    return (tl.exp(scaled.to(tl.float64)) * MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def highest_cut(values, weights, is_member, base, target):
    """Return the largest value with base + sum(weights of members >= value) >= target, or -inf.

    `low` and `high` are always members; low reaches the target, what is above high does not. Each
    step leaves out at least one value, for values spread evenly half of them.
    """
    low = tl.min(tl.where(is_member, values, INFINITY), 0)
    high = tl.max(tl.where(is_member, values, -INFINITY), 0)
    total = base + tl.sum(tl.where(is_member, weights, 0), 0)
    is_reached = total.to(tl.float64) >= target
    while is_reached & (low < high):
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        is_upper = is_member & (values >= middle)
        upper = base + tl.sum(tl.where(is_upper, weights, 0), 0)
        lowest_upper = tl.min(tl.where(is_upper, values, INFINITY), 0)
        highest_lower = tl.max(tl.where(is_member & (values < middle), values, -INFINITY), 0)
        reaches = upper.to(tl.float64) >= target
        low = tl.where(reaches, lowest_upper, low)
        high = tl.where(reaches, high, highest_lower)
    return tl.where(is_reached, low, -INFINITY)


@triton.jit
def mass_of_top_k(values, masses, is_member, cut, count_above, mass_above, top_k):
    """Return the mass of exactly top_k tokens; of those that tie at the cut, as many as fit."""
    is_above = is_member & (values > cut)
    count = count_above + tl.sum(is_above.to(tl.int64), 0)
    mass = mass_above + tl.sum(tl.where(is_above, masses, 0), 0)
    return mass + (top_k - count) * mass_of(cut)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def group_max_kernel(
    group_max_ptr,  # [num_rows, num_tiles * (TILE // GROUP)], float32
    tile_max_ptr,  # [num_rows, num_tiles], float32
    tile_sum_ptr,  # [num_rows, num_tiles], float32: sum of exp((logit - tile's) / temperature)
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,  # [num_rows, mask_stride], int32; read only if HAS_MASK
    temperature_ptr,  # [num_rows], float64
    top_k_ptr,  # [num_rows], int64
    top_p_ptr,  # [num_rows], float64
    logits_stride,
    mask_stride,
    vocab_size,
    num_tiles,
    HAS_MASK: tl.constexpr,
    IS_PLAIN: tl.constexpr,  # temperature 1 and sums for all rows
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_tiles, num_rows)
    if IS_CHAINED:
        wait_for_launch_before()
    my_tile = tl.program_id(0)
    my_row = tl.program_id(1).to(tl.int64)
    tokens = my_tile * TILE + tl.arange(0, TILE)
    logits = load_logits(
        logits_ptr + my_row * logits_stride,
        mask_ptr + my_row * mask_stride,
        tokens,
        tokens < vocab_size,
        HAS_MASK,
    )
    groups = tl.max(tl.reshape(logits, [TILE // GROUP, GROUP]), 1)
    my_groups = (my_row * num_tiles + my_tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(group_max_ptr + my_groups, groups)
    if IS_PLAIN:
        needs_sum = True
        rate = 1.0
    else:
        top_k = tl.load(top_k_ptr + my_row)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        needs_sum = (tl.load(top_p_ptr + my_row) < 1.0) & (not has_top_k)
        # Bounded: 0 * inf would be NaN.
        rate = tl.minimum(1.0 / tl.load(temperature_ptr + my_row), 2.0e38).to(tl.float32)
    if needs_sum:
        tile_max = tl.max(groups, 0)
        safe_max = tl.where(tl.abs(tile_max) < INFINITY, tile_max, 0.0)
        tile_sum = tl.sum(tl.exp2((logits - safe_max) * (rate * LOG2_E)), 0)
        tl.store(tile_max_ptr + my_row * num_tiles + my_tile, tile_max)
        tl.store(tile_sum_ptr + my_row * num_tiles + my_tile, tile_sum)


@triton.jit
def sum_of_tiles(
    tile_max_ptr, tile_sum_ptr, row_max, temperature, num_tiles, TILES_PADDED: tl.constexpr
):
    """Return the sum of exp(scaled) over a row, up to SUM_ERROR, as float64."""
    tiles = tl.arange(0, TILES_PADDED)
    is_tile = tiles < num_tiles
    tile_max = tl.load(tile_max_ptr + tiles, mask=is_tile, other=-INFINITY)
    tile_sum = tl.load(tile_sum_ptr + tiles, mask=is_tile, other=0.0).to(tl.float64)
    factor = tl.exp(scale_logits(tile_max, row_max, temperature).to(tl.float64))
    return tl.sum(tile_sum * factor, 0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seed_ptr",
        "position_ptr",
    ]
)
def choose_kernel(
    tokens_ptr,  # [num_rows], int32: the result; -1 where the row is invalid
    state_ptr,  # [num_rows, NUM_FIELDS], int64
    limits_ptr,  # [num_rows, 2], float32: the row's largest logit, lower end of the bins
    bin_count_ptr,  # [num_rows, NUM_BINS], int32
    bin_mass_ptr,  # [num_rows, NUM_BINS], int64
    group_list_ptr,  # [num_rows, num_groups], int32
    candidate_ptr,  # [num_rows, CAPACITY], float32: scaled logits
    candidate_token_ptr,  # [num_rows, CAPACITY], int32
    group_max_ptr,  # [num_rows, num_groups], float32
    tile_max_ptr,  # [num_rows, num_tiles], float32
    tile_sum_ptr,  # [num_rows, num_tiles], float32
    logits_ptr,  # [num_rows, vocab_size]
    mask_ptr,
    temperature_ptr,  # [num_rows], float64; 0 is greedy
    top_k_ptr,  # [num_rows], int64
    top_p_ptr,  # [num_rows], float64
    min_p_ptr,  # [num_rows], float64
    seed_ptr,  # [num_rows], int64
    position_ptr,  # [num_rows], int64
    logits_stride,
    mask_stride,
    vocab_size,
    num_groups,
    num_tiles,
    HAS_MASK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    GATHER: tl.constexpr,  # groups read at a time
    CAPACITY: tl.constexpr,
    MAX_GATHERED: tl.constexpr,
    NUM_BINS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_rows,)
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(0).to(tl.int64)
    my_logits_ptr = logits_ptr + my_row * logits_stride
    my_mask_ptr = mask_ptr + my_row * mask_stride
    my_state_ptr = state_ptr + my_row * NUM_FIELDS
    groups = tl.arange(0, GROUPS_PADDED)
    group_max = tl.load(
        group_max_ptr + my_row * num_groups + groups, mask=groups < num_groups, other=-INFINITY
    )
    row_max = tl.max(group_max, 0)
    temperature = tl.load(temperature_ptr + my_row)
    tl.store(limits_ptr + my_row * 2, row_max)
    tl.store(my_state_ptr + STATUS, SETTLED)
    if tl.abs(row_max) == INFINITY:
        tl.store(tokens_ptr + my_row, -1)
    elif temperature == 0.0:
        group = tl.min(tl.where(group_max == row_max, groups, NO_TOKEN), 0)
        tokens = group * GROUP + tl.arange(0, GROUP)
        logits = load_logits(my_logits_ptr, my_mask_ptr, tokens, tokens < vocab_size, HAS_MASK)
        token = tl.min(tl.where(logits == row_max, tokens, NO_TOKEN), 0)
        tl.store(tokens_ptr + my_row, token)
    else:
        top_k = tl.load(top_k_ptr + my_row)
        top_p = tl.load(top_p_ptr + my_row)
        least = least_by_min_p(tl.load(min_p_ptr + my_row))
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        has_top_p = top_p < 1.0
        scaled_max = scale_logits(group_max, row_max, temperature)  # [GROUPS_PADDED]
        is_live = scaled_max > -INFINITY

        # A bound below which no token can be kept, from the groups' largest tokens alone: they
        # are tokens too, so that k of them, or enough mass, are all that is needed above it.
        least_sum = 1.0 + tl.zeros([], tl.float64)
        largest_sum = least_sum
        if has_top_k:
            ones = is_live.to(tl.int32)
            bound = highest_cut(scaled_max, ones, is_live, 0, top_k.to(tl.float64))
        elif has_top_p:
            row_sum = sum_of_tiles(
                tile_max_ptr + my_row * num_tiles,
                tile_sum_ptr + my_row * num_tiles,
                row_max,
                temperature,
                num_tiles,
                TILES_PADDED,
            )
            least_sum = row_sum * (1.0 - SUM_ERROR) * MASS_UNIT
            largest_sum = row_sum * (1.0 + SUM_ERROR) * MASS_UNIT
            bound = highest_cut(
                scaled_max,
                mass_of(scaled_max),
                is_live,
                tl.zeros([], tl.int64),
                top_p * largest_sum,
            )
        else:
            bound = least
        is_selected = is_live & (scaled_max >= bound)
        num_selected = tl.sum(is_selected.to(tl.int32), 0)

        count = tl.full([], CAPACITY + 1, tl.int32)
        is_bounded = (bound > -INFINITY) | (num_selected * GROUP <= CAPACITY)
        if is_bounded & (num_selected <= MAX_GATHERED):
            my_list_ptr = group_list_ptr + my_row * num_groups
            list_places = tl.cumsum(is_selected.to(tl.int32), 0) - 1
            tl.store(my_list_ptr + list_places, groups, mask=is_selected)
            tl.debug_barrier()
            count = tl.full([], 0, tl.int32)
            for first in range(0, num_selected, GATHER):
                index = first + tl.arange(0, GATHER)
                listed = tl.load(my_list_ptr + index, mask=index < num_selected, other=0)
                tokens_2d = listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                is_token_2d = (index < num_selected)[:, None] & (tokens_2d < vocab_size)
                tokens = tl.reshape(tokens_2d, [GATHER * GROUP])
                is_token = tl.reshape(is_token_2d, [GATHER * GROUP])
                logits = load_logits(my_logits_ptr, my_mask_ptr, tokens, is_token, HAS_MASK)
                scaled = scale_logits(logits, row_max, temperature)
                is_candidate = (scaled >= bound) & (scaled > -INFINITY)
                flags = is_candidate.to(tl.int32)
                places = count + tl.cumsum(flags, 0) - 1
                fits = is_candidate & (places < CAPACITY)
                tl.store(candidate_ptr + my_row * CAPACITY + places, scaled, mask=fits)
                tl.store(candidate_token_ptr + my_row * CAPACITY + places, tokens, mask=fits)
                count += tl.sum(flags, 0)
            tl.debug_barrier()

        is_settled = tl.full([], 0, tl.int1)
        if count <= CAPACITY:
            slots = tl.arange(0, CAPACITY)
            is_member = slots < count
            scaled = tl.load(
                candidate_ptr + my_row * CAPACITY + slots, mask=is_member, other=-INFINITY
            )
            tokens = tl.load(
                candidate_token_ptr + my_row * CAPACITY + slots, mask=is_member, other=NO_TOKEN
            )
            cut = tl.full([], -INFINITY, tl.float32)
            none = tl.zeros([], tl.int64)
            if has_top_k:
                ones = is_member.to(tl.int32)
                cut = highest_cut(scaled, ones, is_member, 0, top_k.to(tl.float64))
            is_settled = tl.full([], 1, tl.int1)
            if has_top_p:
                masses = mass_of(scaled)
                if cut > -INFINITY:
                    mass = mass_of_top_k(scaled, masses, is_member, cut, none, none, top_k)
                    target = top_p * mass.to(tl.float64)
                elif has_top_k | (bound == -INFINITY):
                    # All tokens are candidates: fewer than k, or few at all.
                    mass = tl.sum(tl.where(is_member, masses, 0), 0)
                    target = top_p * mass.to(tl.float64)
                else:
                    # The sum is known within bounds: settled only if both have the same cut.
                    target = top_p * largest_sum
                    other = highest_cut(scaled, masses, is_member, none, top_p * least_sum)
                    cut = highest_cut(scaled, masses, is_member, none, target)
                    is_settled = cut == other
                cut = tl.maximum(cut, highest_cut(scaled, masses, is_member, none, target))
            if is_settled:
                base = draw_base(tl.load(seed_ptr + my_row), tl.load(position_ptr + my_row))
                is_kept = is_member & (scaled >= cut) & (scaled >= least)
                score = tl.full([], -INFINITY, tl.float64)
                no_token = tl.full([], NO_TOKEN, tl.int32)
                _, token = improve_draw(scaled, tokens, is_kept, base, score, no_token)
                tl.store(tokens_ptr + my_row, token)
        if not is_settled:
            tl.store(my_state_ptr + STATUS, tl.where(has_top_k | has_top_p, BINNED, UNCUT))
            tl.store(my_state_ptr + WINDOW_COUNT, 0)
            tl.store(my_state_ptr + BELOW_MASS, 0)
            tl.store(my_state_ptr + BELOW_COUNT, 0)
            if has_top_k | has_top_p:
                lowest = tl.where(has_top_k, bound, -INFINITY)
                if not has_top_k:
                    # Together, all tokens below have less than the mass that top-p leaves out.
                    out = (1.0 - top_p) * least_sum / MASS_UNIT / vocab_size
                    lowest = tl.log(out).to(tl.float32) - 0.01
                lowest = tl.minimum(tl.maximum(lowest, -64.0), -(2.0**-10))
                tl.store(limits_ptr + my_row * 2 + 1, lowest)
                bins = tl.arange(0, NUM_BINS)
                tl.store(bin_count_ptr + my_row * NUM_BINS + bins, tl.zeros([NUM_BINS], tl.int32))
                tl.store(bin_mass_ptr + my_row * NUM_BINS + bins, tl.zeros([NUM_BINS], tl.int64))
