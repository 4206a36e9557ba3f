/* x with a border of zeros, so that a window of the convolution is one offset from its pixel. A block is a part of one plane. */
KERNEL(32, 8)
pad(GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT padded, int height, int width, int rows, int columns, int top, int left)
{
    LONG plane = BLOCK_X;
    int row = BLOCK_Y * 8 + THREAD_Y, column = BLOCK_Z * 32 + THREAD_X;
    if (row < rows && column < columns) {
        int h = row - top, w = column - left;
        int inside = h >= 0 && h < height && w >= 0 && w < width;
        padded[(plane * rows + row) * columns + column] = inside ? READ(x + (plane * height + h) * width + w) : 0.0f;
    }
}
