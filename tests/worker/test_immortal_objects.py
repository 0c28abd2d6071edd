"""The zygote's objects are immortal from Python 3.12 on (native/immortal.c); a program notices nothing of it."""

import sys

from sandbox_harness import Lab

HAS_IMMORTAL_OBJECTS = (3, 12) <= sys.version_info < (3, 14)

COUNTS = """
import collections, json, sys
class Own:
    def method(self): return "a constant"
found = [json.dumps, json.dumps.__code__, json, json.__dict__, collections.OrderedDict, json.JSONEncoder.__init__]
print([sys.getrefcount(one) > 2**31 for one in found])
print([sys.getrefcount(one) > 2**31 for one in (Own, Own.method, Own(), [1], Own.__dict__)])
"""

OWN_OBJECTS_END = """
import gc, weakref
class Own:
    def __del__(self): print("ended", self.name)
def own(name):
    one = Own()
    one.name = name
    return one
plain, cyclic = own("plain"), own("cyclic")
cyclic.itself = cyclic
seen = [weakref.ref(plain), weakref.ref(cyclic)]
del plain
print([one() is None for one in seen])
del cyclic
gc.collect()
print([one() is None for one in seen])
import json
json.kept = own("in a module")  # a mortal object in an immortal one
del json.kept
json.kept = own("replaced")
json.kept = None
"""

OLD_OBJECTS_CHANGE = """
import collections, gc, json, re, string, weakref
string.digits += "x"                       # in place only if there is one reference
assert string.digits == "0123456789x" and "0123456789" in string.printable
collections.Counter.added = 1
assert collections.Counter().added == 1
del collections.Counter.added
json.JSONEncoder.item_separator = "; "
assert json.dumps([1, 2], indent=None, separators=None) and json.JSONEncoder().encode([1, 2]) == "[1; 2]"
json.dumps.__defaults__ = None
json.dumps.__kwdefaults__["skipkeys"] = True
assert json.dumps({(1, 2): 3}) == "{}"
re.purge()
assert re.fullmatch("a+", "aaa")
names = weakref.ref(json.decoder)
gc.unfreeze()
print(gc.collect() >= 0, gc.collect(), names() is json.decoder)
"""

MODULES_GO = """
import gc, importlib, sys
for round_ in range(3):
    import json, statistics, decimal, collections
    assert json.loads(json.dumps({"a": [1.5, None]})) == {"a": [1.5, None]}
    assert statistics.mean([1, 2, 3]) == 2 and decimal.Decimal(2).sqrt() > 1
    importlib.reload(json)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("json", "statistics", "decimal", "fractions")]:
        del sys.modules[name]
    del json, statistics, decimal
    gc.collect()
import types
for module in list(sys.modules.values()):  # even what other modules use
    if isinstance(module, types.ModuleType) and module.__name__ in ("heapq", "bisect", "copy"):
        vars(module).clear()
gc.collect()
print("gone and back")
"""

STRINGS = """
import sys
kept = {}
for k in range(20_000):
    name = sys.intern("name%d" % (k % 500))
    kept[name] = kept.get(name, 0) + 1
    setattr(sys, name, k)
    if k % 3 == 0:
        delattr(sys, name)
print(len(kept), sum(kept.values()))
"""

ARRAYS = """
import gc, numpy as np
before = np.arange(5.0)
total = before + before * 2 + before  # numpy reuses temporaries that have one reference
for _ in range(50):
    total = total + np.ones(5) * 2
np.set_printoptions(precision=3)
own = np.arange(4)
own.resize(8, refcheck=False)
del np.linalg.norm
gc.collect()
print(total.tolist(), own.sum(), np.pi)
"""


async def test_references_are_counted_for_own_objects_only(lab: Lab) -> None:
    result = await lab.run(COUNTS)
    assert result.stdout == f"{[HAS_IMMORTAL_OBJECTS] * 6}\n{[False] * 5}\n", result.stderr


async def test_own_objects_end_as_everywhere_else(lab: Lab) -> None:
    result = await lab.run(OWN_OBJECTS_END)
    expected = ["ended plain", "[True, False]", "ended cyclic", "[True, True]", "ended in a module", "ended replaced"]
    assert result.stdout.splitlines() == expected, result.stderr


async def test_old_objects_can_be_changed_and_collected(lab: Lab) -> None:
    result = await lab.run(OLD_OBJECTS_CHANGE)
    assert result.stdout == "True 0 True\n", result.stderr


async def test_modules_can_be_deleted_and_imported_again(lab: Lab) -> None:
    result = await lab.run(MODULES_GO)
    assert result.stdout == "gone and back\n", result.stderr


async def test_names_can_be_interned_and_deleted(lab: Lab) -> None:
    result = await lab.run(STRINGS)
    assert result.stdout == "500 20000\n", result.stderr


async def test_arrays_reuse_only_their_own_temporaries(lab: Lab) -> None:
    result = await lab.run(ARRAYS)
    assert result.stdout == f"{[100.0 + 4 * k for k in range(5)]} 6 3.141592653589793\n", result.stderr


async def test_a_program_changes_no_object_of_another(lab: Lab) -> None:
    await lab.run("import json, string\njson.kept = string.digits = 'changed'\njson.dumps.__code__ = (lambda: 1).__code__")
    result = await lab.run("import json, string\nprint(json.dumps([1]), string.digits, hasattr(json, 'kept'))")
    assert result.stdout == "[1] 0123456789 False\n", result.stderr
