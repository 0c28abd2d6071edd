# E 59: looks through every frame and object for answers, its own or those of an earlier call
# expect: status=ok
# after: e_059_call_with_a_mark.py
import gc
import sys

mark = "95-REWSNA-DETCEPXE"[::-1]
seen = set()
found = []
waiting = [*gc.get_objects(), sys.modules]
frame = sys._getframe()
while frame:
    waiting += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
own = {id(mark), id(seen), id(found)}
for _ in range(4):
    waiting, now = [], waiting
    for thing in now:
        if id(thing) in seen or id(thing) in own:
            continue
        seen.add(id(thing))
        if isinstance(thing, str | bytes):
            text = thing if isinstance(thing, str) else thing.decode("latin-1")
            if mark in text:
                found.append(text[:80])
        elif isinstance(thing, dict):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
print(f"escaped: {found}" if found else "contained")
