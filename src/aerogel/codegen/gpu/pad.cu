/* x with a border of zeros, so that a window of the convolution is one offset from its pixel; of f16 two pixels in a word, `apart` rows
   apart. A block is a part of one plane. */
KERNEL(32, 8)
pad(GLOBAL const STORED *RESTRICT x, GLOBAL WORD *RESTRICT padded, int height, int width, int rows, int columns, int top, int left,
    int apart)
{
    LONG plane = BLOCK_X;
    int row = BLOCK_Y * 8 + THREAD_Y, column = BLOCK_Z * 32 + THREAD_X;
    if (row < rows && column < columns) {
        int h = row - top, w = column - left;
        int across = w >= 0 && w < width;
        WORD v = across && h >= 0 && h < height ? READ(x + (plane * height + h) * width + w) : 0;
#if HALF
        h += apart;
        v |= across && h >= 0 && h < height ? (WORD)READ(x + (plane * height + h) * width + w) << 16 : 0u;
#endif
        padded[(plane * rows + row) * columns + column] = v;
    }
}
