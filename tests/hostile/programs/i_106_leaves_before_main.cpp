// I 106: leaves with exit code 0 before main
// expect: status=ok exit=0 stdout=""
// needs: cpp
#include <cstdio>
#include <unistd.h>
struct Early {
    Early() { _exit(0); }
} early;
int main() {
    std::puts("escaped: main ran");
    return 1;
}
