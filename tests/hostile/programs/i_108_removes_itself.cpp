// I 108: removes its own file, or changes it; another run of the same program is not concerned
// expect: status=ok
// needs: cpp
#include <cstdio>
#include <fcntl.h>
#include <initializer_list>
#include <unistd.h>
int main(int, char **argv) {
    char own[4096];
    ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);
    if (length > 0) {
        own[length] = 0;
        unlink(own);
    }
    unlink(argv[0]);
    for (const char *path : {"/proc/self/exe", (const char *)argv[0]}) {
        int fd = open(path, O_WRONLY);
        if (fd >= 0 && write(fd, "x", 1) == 1)
            std::printf("escaped: %s can be written\n", path);
    }
    std::puts("contained");
    return 0;
}
