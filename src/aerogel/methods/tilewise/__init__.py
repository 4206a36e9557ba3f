"""`tilewise`: filters that keep the same positions run as one dense matrix product over gathered windows of
x.

Paper: tile-wise sparsity (Guo et al., SC'20, arXiv 2008.13006). Pruning (TW-1D, TW-2D;
`aerogel.prune(pattern="tilewise")`) drops whole filters and, in each tile of 128 filters, whole positions (c,
r, s); what is left of a tile is dense, though no two tiles need be alike. TEW gives single elements back,
which run as rows.

No mark says where tiles are: any pruner's zeros are taken as they are. Filters with more than a few nonzeros
are looked at in runs of 32; what most of a run keep are the run's positions, and neighbouring runs with the
same are one tile. What stands elsewhere is rows, so the packing is exact for every weight.

Wins where vectors of x are read often: FMAs are the limit, not loads (codegen/cpu/blocks.py). On CPUs a small
layer without zeros is one tile too: it then runs between sparse layers without the two copies that a dense
library costs. Refuses weights whose filters share few positions, and sums in fp16.
"""

NAME = "tilewise"
PAPER = "Tile-wise sparsity, SC'20, arXiv 2008.13006"
SUMMARY = (
    "filters that keep the same positions as one dense product over gathered input; tile-wise "
    "pruning (TW, TEW)"
)
SKIPS_INPUT = False
RANK = 1
DEMANDS = None
ROUNDING = "channels"
NOT_ON: dict[str, str] = {}
