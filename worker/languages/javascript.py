from worker.languages.kinds import Interpreted

JAVASCRIPT = Interpreted("javascript", command="node", source="main.js")
