// I 104: takes files of the machine into the program
// expect: status=compile_error blame=model
// needs: cpp
#include <cstdio>
asm(".section .rodata\nsecret: .incbin \"/etc/shadow\"\n.byte 0\n.text\n");
extern "C" const char secret[] __asm__("secret");
int main() {
    std::printf("escaped: %s\n", secret);
    return 0;
}
