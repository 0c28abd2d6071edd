# K 117: reads and changes a file of the host that everybody may write to
# expect: status=ok
# bait
# needs: landlock|mntns
import os

from attack import attempt, tell

bait = os.environ["BAIT"]
attempt("read", open, f"{bait}/file")
attempt("write", open, f"{bait}/file", "w")
attempt("append", open, f"{bait}/file", "a")
attempt("truncate", os.truncate, f"{bait}/file", 0)
attempt("list", os.listdir, bait)
attempt("link", os.link, f"{bait}/file", "taken")
attempt("rename", os.rename, f"{bait}/file", "taken")
attempt("remove", os.unlink, f"{bait}/file")
os.symlink(f"{bait}/file", "link")
attempt("through a link", open, "link")
tell()
