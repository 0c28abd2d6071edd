from exec_wire import Limits
from worker.languages.kinds import Compiled

# A template bomb costs these limits and nothing else.
CPP = Compiled(
    "cpp",
    compiler="g++",
    flags=("-O2", "-std=c++17"),
    source="main.cpp",
    limits=Limits(wall_s=30.0, memory_mb=1024, output_kb=256, file_mb=64),
)
