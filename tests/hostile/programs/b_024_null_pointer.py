# B 24: reads the address 0
# expect: status=signal signal=11 blame=model
import ctypes

ctypes.string_at(0)
