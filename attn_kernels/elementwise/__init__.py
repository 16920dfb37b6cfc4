"""Operations between matrix products: norm with residual, gated activation."""
