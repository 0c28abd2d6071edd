from worker.languages.kinds import Language

PYTHON = Language("python")
