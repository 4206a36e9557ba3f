/* Runs one generated kernel under qemu: reads its argument slots from a file, calls it as two threads would, one after the
   other, and writes the output buffer. A slot is a number (tag 0), or a buffer (tag 1): size, start of the pointer in it, bytes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void rows(int64_t *arguments, int64_t thread, int64_t threads);

int main(int argc, char **argv) {
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    int64_t count, tag, value, start, y_size = 0;
    if (argc != 3 || !in || !out || fread(&count, 8, 1, in) != 1) return 1;
    int64_t *slots = calloc(count, 8);
    char *y = NULL;
    for (int64_t i = 0; i < count; i++) {
        if (fread(&tag, 8, 1, in) != 1 || fread(&value, 8, 1, in) != 1) return 2;
        slots[i] = value;
        if (tag) {
            char *buffer = malloc(value + 1);
            if (fread(&start, 8, 1, in) != 1 || fread(buffer, 1, value, in) != (size_t)value) return 3;
            slots[i] = (int64_t)(buffer + start);
            if (i == 1) y = buffer, y_size = value;
        }
    }
    rows(slots, 0, 2);
    rows(slots, 1, 2);
    return fwrite(y, 1, y_size, out) == (size_t)y_size ? 0 : 4;
}
