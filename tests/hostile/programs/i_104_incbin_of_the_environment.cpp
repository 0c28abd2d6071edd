// I 104: the same, for the compiler's own environment; there is nothing in it that a program does not have itself
// expect: status=compile_error|ok stdout_has=""
// needs: cpp
#include <cstdio>
#include <cstring>
asm(".section .rodata\nsecret: .incbin \"/proc/self/environ\"\nsecret_end: .byte 0\n.text\n");
extern "C" const char secret[] __asm__("secret"), secret_end[] __asm__("secret_end");
int main() {
    for (const char *at = secret; at < secret_end; at += std::strlen(at) + 1)
        if (std::strstr(at, "SECRET") || std::strstr(at, "TOKEN") || std::strstr(at, "REDIS"))
            std::printf("escaped: %s\n", at);
    std::puts("contained");
    return 0;
}
