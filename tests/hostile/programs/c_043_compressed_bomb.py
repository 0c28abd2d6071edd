# C 43: a megabyte that unpacks to a gigabyte
# expect: status=memory_limit blame=model
# without cgroup: status=memory_limit|error
# limits: wall_s=10
import zlib

packer = zlib.compressobj(9, zlib.DEFLATED, -15)
block = packer.compress(bytes(16 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
zlib.decompress(block * 64, -15)
print("escaped: 1 GB")
