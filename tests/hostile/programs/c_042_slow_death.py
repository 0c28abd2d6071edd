# C 42: much memory in small pieces that refer to each other; taking it down must not take long
# expect: status=timeout
# limits: wall_s=1.5 memory_mb=256


class Piece:
    def __init__(self, other):
        self.other, self.own = other, self
        self.data = bytearray(1000)


piece = None
for _ in range(100_000):
    piece = Piece(piece)
while True:
    pass
