// I 102: the same, for the passwords
// expect: status=compile_error blame=model stderr_lacks=root:
// needs: cpp
#include "/etc/shadow"
#include "/etc/passwd"
int main() { return 0; }
