// I 102: has the compiler print files of the machine in its messages
// expect: status=compile_error blame=model stderr_lacks=PATH=
// needs: cpp
#include "/proc/self/environ"
#include "/proc/1/environ"
int main() { return 0; }
