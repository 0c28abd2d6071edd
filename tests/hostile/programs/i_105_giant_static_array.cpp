// I 105: a binary of 100 GB
// expect: status=compile_error|timeout|memory_limit|signal|error blame=model
// needs: cpp
// limits: wall_s=5 memory_mb=256
char giant[100L << 30] = {1};
int main() { return giant[0]; }
