"""`depthwise`: int8 where every channel has a filter of its own. Four taps of a channel meet in one lane.

A pixel of four channels is 32 bits of x, as in `quads`. Windows of four taps are loaded side by side and
woven, so that a lane holds one channel of one pixel under all four:

    loads     a0 b0 c0 d0   (tap 0, channels a to d)   a1 b1 c1 d1   a2 b2 c2 d2   a3 b3 c3 d3
    woven     a0 a1 a2 a3   b0 b1 b2 b3   c0 c1 c2 c3   d0 d1 d2 d3
    sum       += a0 w0 + a1 w1 + a2 w2 + a3 w3          32 bits, exact: one instruction where the CPU has it

Four sums of a vector then narrow to the four channels of y, in their order, without a shuffle of their own.

Packed:

    value    [c / 4][taps / 4][channel][tap]       bytes; taps and channels that are not there are zero

Paper: none of the five. Wins on depthwise layers in int8, of which `quads` would multiply one channel in
four. Zeros are not skipped: such a layer has few weights. Refuses floats, and layers in which a filter reads
several channels or a channel has several filters.
"""

NAME = "depthwise"
PAPER = "int8, a filter of its own for each channel"
SUMMARY = "depthwise layers in int8: four taps of a channel in one instruction"
SKIPS_INPUT = False
RANK = 0
DEMANDS = None
ROUNDING = None
NOT_ON = {"gpu": "int8 runs on CPUs only"}
