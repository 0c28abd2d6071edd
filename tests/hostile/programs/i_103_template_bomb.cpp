// I 103: compiles for ever
// expect: status=compile_error|timeout|memory_limit blame=model max_wall_s=45
// needs: cpp
// limits: wall_s=5 memory_mb=256
template <int depth, int width> struct Bomb {
    static const long value = Bomb<depth - 1, 2 * width>::value + Bomb<depth - 1, 2 * width + 1>::value;
};
template <int width> struct Bomb<0, width> { static const long value = width; };
int main() { return (int)Bomb<28, 1>::value; }
