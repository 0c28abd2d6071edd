// I 107: a system call by the 32-bit door
// expect: status=signal signal=31 blame=model stdout=""
// needs: cpp seccomp x86_64
#include <cstdio>
int main() {
    long got = 20;
    asm volatile("int $0x80" : "+a"(got) : : "memory");
    std::printf("escaped: %ld\n", got);
    return 0;
}
