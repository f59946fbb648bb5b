/* Run one kernel of this program on memory from a file: its first page has the address of the file's content, its size,
   and five arguments. A kernel that takes fewer does not read the registers of the others. */
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>

void KERNEL(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

int main(int count, char **arguments) {
    int file = open(arguments[1], O_RDWR);
    uint64_t *header = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    if (count != 2 || header == MAP_FAILED) return 2;
    void *base = (void *)header[0];
    if (mmap(base, header[1], PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != base) return 3;
    KERNEL(header[2], header[3], header[4], header[5], header[6]);
    return 0;
}
