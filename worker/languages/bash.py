from worker.languages.kinds import Interpreted

BASH = Interpreted("bash", command="bash", source="main.sh")
