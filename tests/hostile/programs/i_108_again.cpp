// I 108: the same program again, after one that removed itself
// expect: status=ok
// needs: cpp
// after: i_108_removes_itself.cpp
#include <cstdio>
#include <unistd.h>
int main(int, char **argv) {
    unlink(argv[0]);
    std::puts("contained");
    return 0;
}
