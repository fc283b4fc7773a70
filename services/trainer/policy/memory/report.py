"""`python -m tidemill.services.trainer.policy.memory.report REQUEST`: what a run takes of machines, as JSON.

The request is JSON: `config`, a whole run's; `machines`, a list of `gpus`, `gpu_bytes` and `host_bytes`; and
`finds`, whether settings that use all GPUs are looked for, whatever the config's are. The last line of the
output is the answer: a `Fit` for each machine, and the model's sizes. Exits with 2 and the reason on stderr
where the model cannot be measured. A process of its own, because it imports torch and transformers.
"""

import sys
from dataclasses import asdict
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.process.checks import Answer, answer_check
from tidemill.services.trainer.policy.memory.fit import Machine, examine_fit, find_settings
from tidemill.services.trainer.policy.memory.sizes import read_model


def report(request: Any) -> Answer:
    """The answer to one request."""
    config = RunConfig.model_validate(request["config"])
    model = read_model(config)
    machines = [Machine(**machine) for machine in request["machines"]]
    answer = find_settings if request["finds"] else examine_fit
    fits = [answer(config, model, machine) for machine in machines]
    return {"sizes": asdict(model.sizes), "fits": [fit.as_json() for fit in fits]}


if __name__ == "__main__":
    sys.exit(answer_check(report))
