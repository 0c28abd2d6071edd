# K 124: runs in the slot in which another program left very deep folders
# expect: status=ok
# after: k_124_leaves_deep_folders.py
import os

print(f"escaped: {os.listdir('.')}" if os.listdir(".") else "contained")
