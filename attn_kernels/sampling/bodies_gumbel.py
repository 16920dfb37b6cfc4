"""Device functions of a draw: random bits of (seed, position, token id), and the Gumbel-max of a
tile.

The bits are those of reference_gumbel.py, where the recipe is described: v is the upper 52 bits as
a fraction, E = -log(1 - v) an exponential variable, the noise -log(E). A score, logit plus noise,
is a float64, but hardly any is computed. As E >= v, a score is at most logit - log(v), so that a
token can only win if v * exp(-logit) <= exp(-best score so far): no logarithm, and few tokens pass.
"""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E37_79B9_7F4A_7C15)
ODD = tl.constexpr(0xD1B5_4A32_D192_ED03)
MULTIPLIER_1 = tl.constexpr(0xBF58_476D_1CE4_E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D0_49BB_1331_11EB)
LOG2_E = tl.constexpr(1.4426950408889634)
NO_TOKEN = tl.constexpr(0x7FFF_FFFF)
# A bound in float32 of a score that could win, from a logit above -41, is 2**-16 off at most.
DOUBT = tl.constexpr(2.0**-14)


@triton.jit
def mix(bits):  # uint64
    bits = (bits ^ (bits >> 30)) * MULTIPLIER_1
    bits = (bits ^ (bits >> 27)) * MULTIPLIER_2
    return bits ^ (bits >> 31)


@triton.jit
def draw_base(seed, position):  # int64 each
    return mix(mix(seed.to(tl.uint64) + GOLDEN) ^ (position.to(tl.uint64) * ODD))


@triton.jit
def random_bits(base, tokens):
    return mix(base + (tokens.to(tl.int64) + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def gumbel_noise(bits):
    """Gumbel noise in float64, as reference_gumbel.py has it up to rounding."""
    value = ((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52
    # log1p(-value): what 1 - value rounds away is given back by the second factor.
    rest = 1.0 - value
    log1p = tl.where(rest == 1.0, -value, tl.log(rest) * (-value / (rest - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def improve_draw(scaled, tokens, is_kept, base, best_score, best_token):
    """Return the better of a draw and the best of a tile; of equal scores the lower token.

    scaled: float32 [N], at most 0; tokens: int32 [N]; base: of draw_base; best_score: float64.
    """
    bits = random_bits(base, tokens)
    value = (bits >> 32).to(tl.uint32).to(tl.float32) * 2.0**-32
    # A score is at most -log(ratio). Noise lies between -4 and 37: the row's largest logit, 0, has
    # always a better score than one of -80, which is left out because exp(80) is still finite.
    ratio = value * tl.exp2(scaled * -LOG2_E)
    ratio = tl.where(is_kept & (scaled > -80.0), ratio, float("inf"))
    smallest = tl.min(ratio, 0)
    while (smallest < float("inf")) & (smallest <= largest_ratio(best_score)):
        token = tl.min(tl.where(ratio == smallest, tokens, NO_TOKEN), 0)
        is_token = tokens == token
        mine = tl.max(tl.where(is_token, scaled, -float("inf")), 0)
        score = mine.to(tl.float64) + gumbel_noise(random_bits(base, token))
        best_score, best_token = better_draw(best_score, best_token, score, token)
        ratio = tl.where(is_token, float("inf"), ratio)
        smallest = tl.min(ratio, 0)
    return best_score, best_token


@triton.jit
def largest_ratio(best_score):
    """Return the largest ratio with which a token can still reach a score."""
    return tl.exp2(((best_score - DOUBT) * -LOG2_E).to(tl.float32))


@triton.jit
def better_draw(score, token, other_score, other_token):
    is_other = (other_score > score) | ((other_score == score) & (other_token < token))
    return tl.where(is_other, other_score, score), tl.where(is_other, other_token, token)
