"""`stridepack`: a tile of x is staged next to the core once, and every filter of a group consumes it.

Paper: Tetris (PPoPP'24). Channels are cut into stages of TILE_C; a nonzero's position within its stage, the
stride packed filter, is s | r << 3 | (c mod TILE_C) << 6 in two bytes. On a GPU the tile is in shared memory
and lanes are filters; here the tile is an L1-resident scratch and lanes are neighbouring output pixels, so
lengths need no padding. Filter group reorder deals filters to groups so that threads finish together.

    group    [0, 4, 8]               places 0-3 and 4-7 are the units of work that threads share;
                                     a group reads the same channels
    filter   [5, 0, 2, 7, | 1, ...   the filter at each place: the permutation
    row      [2, 0, 3, 1, | 1, ...   for each group and stage: places, the longest row first
    start    [0, 5, 9, ...           where the nonzeros of that row begin
    position [...]                   two bytes
    value    [...]

Staging aligns every load and swallows a stride of two, so x needs no phases and no particular pitch. Wins
where windows straddle cache lines or x is too far away, and where filters are many enough to pay for the
copy. Refuses kernels of eight and more.
"""

NAME = "stridepack"
PAPER = "Tetris, PPoPP'24"
SUMMARY = (
    "a tile of the input staged next to the core once for all filters of a group; unstructured "
    "sparsity, also strided"
)
SKIPS_INPUT = False
RANK = 3
DEMANDS = None
ROUNDING = "channels"
NOT_ON: dict[str, str] = {}
