// I 107: the system calls of group G, straight from assembly
// expect: status=ok
// needs: cpp seccomp x86_64
#include <cerrno>
#include <cstdio>
static long raw(long number, long a = 0, long b = 0, long c = 0, long d = 0) {
    long got;
    register long r10 asm("r10") = d;
    asm volatile("syscall" : "=a"(got) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return got;
}
int main() {
    const long refused[] = {101, 165, 166, 155, 161, 272, 308, 116, 126, 321, 298, 323, 425, 250, 248, 29, 64, 68, 135, 203, 317, 444, 310, 311};
    int escaped = 0;
    for (long number : refused)
        if (raw(number) != -EPERM)
            escaped += std::printf("escaped: %ld\n", number) > 0;
    if (raw(435) != -ENOSYS || raw(0x40000000 | 39) != -ENOSYS)
        escaped += std::printf("escaped: clone3 or x32\n") > 0;
    for (long family = 2; family < 48; family++)
        if (raw(41, family, 1) != -EAFNOSUPPORT)
            escaped += std::printf("escaped: socket %ld\n", family) > 0;
    if (raw(56, 0x10000000 | 17) != -EPERM)
        escaped += std::printf("escaped: clone\n") > 0;
    std::puts(escaped ? "" : "contained");
    return 0;
}
