"""A plot in a warm interpreter: fonts that it loaded before the fork are of no use after it."""

from sandbox_harness import laboratory

PLOT = """
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.title('The quick brown fox: $x^2$')
plt.savefig('x.png')
print('drawn')
"""


async def test_text_is_drawn_in_a_warm_interpreter() -> None:
    async with laboratory(("data",)) as lab:
        result = await lab.run(PLOT)
    assert (result.status, result.stdout, result.stderr) == ("ok", "drawn\n", "")
