"""`blockgemm`: filters that share positions are clustered, their common positions run as dense products, the
rest as rows.

Paper: Rumi et al. (PACT'20). W is filters x positions; the authors partition a hypergraph of it, we grow
clusters greedily:

    seed      the filter left with most nonzeros
    members   the SIZE filters left that share most positions with the seed,
              then twice with what most members keep
    block     positions that most members keep (ir/stats.py, MOST):
              a dense column pays where rows would cost more

On random weights nothing is found, and there it is slower than `direct`; it is for weights whose filters are
alike, by nature or after `aerogel.reprune`, which removes what is left over where that costs time. Refuses
filters that are not alike, sums in fp16.
"""

NAME = "blockgemm"
PAPER = "Rumi et al., PACT'20"
SUMMARY = "clusters of filters that share positions as dense blocks, what is left over as single nonzeros"
SKIPS_INPUT = False
RANK = None
DEMANDS = None
ROUNDING = "channels"
NOT_ON: dict[str, str] = {}
