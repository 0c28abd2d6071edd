# C 33: so many files that the file system runs out of them; without one of its own it does not
# expect: status=ok
# without mntns: stdout="10000 files\n"
# limits: wall_s=10
number = 0
try:
    for number in range(10_000):
        open(f"file{number}", "w").close()
except OSError:
    print("contained" if number < 8192 else f"escaped: {number} files")
else:
    print(f"{number + 1} files")
