"""Sessions: environments, tools and turns, a row of the board of rollout."""

from infra.grafana.panels import Panel, Query, Row, increase, per_s, spread, total

HEADING = "Rollout and GPU: is generation fast?"

SESSIONS = Row(
    "Sessions with environments",
    (
        Panel(
            "Sessions held",
            "short",
            "Sessions that each worker plays at once.",
            "Falling while tickets wait: look at faults, and at the time of the environment.",
            HEADING,
            (Query(total("tidemill_sessions_held", "worker"), "{{worker}}"),),
        ),
        Panel(
            "Turns of a session",
            "short",
            "Turns of the model, median and 95 %.",
            "At rollout.environment.max_turns: the model finds no end, or the limit is too low.",
            HEADING,
            spread("tidemill_session_turns"),
        ),
        Panel(
            "Engine and environment",
            "s",
            "Time of a session that went to the engine, and to the environment.",
            "The environment's grows: it is the bottleneck; give it more processes or machines.",
            HEADING,
            spread("tidemill_session_seconds", "where"),
        ),
        Panel(
            "Tokens by origin",
            "short",
            "Completion tokens of sessions a second: the model's, which are trained, and the environment's.",
            "Mostly the environment's: cut its answers with max_result_tokens.",
            HEADING,
            (Query(per_s("tidemill_session_tokens_total", "origin"), "{{origin}}"),),
            "stacked",
        ),
        Panel(
            "Ends",
            "short",
            "Sessions a second by how they ended: done, or a limit.",
            "Many at a limit: they are truncated; see mask_truncated.",
            HEADING,
            (Query(per_s("tidemill_session_ends_total", "end"), "{{end}}"),),
            "stacked",
        ),
        Panel(
            "Calls of tools",
            "short",
            "Calls a second: answered, and wrong.",
            "Mostly wrong: read one with `tidemill trace`; call_format may not be the model's.",
            HEADING,
            (Query(per_s("tidemill_environment_calls_total", "result"), "{{result}}"),),
            "stacked",
        ),
        Panel(
            "Wishes of agents",
            "short",
            "Requests that ask for a form of the answer or a forced call, which is sampled freely, by field.",
            "Rewards stay low: programs whose format the prompt does not describe; see docs/agents.md.",
            HEADING,
            (Query(increase("tidemill_agent_wishes_total", "field"), "{{field}}"),),
        ),
        Panel(
            "Faults of environments",
            "short",
            "Plays that an environment's fault ended, by what failed. They are played again, never scored 0.",
            "Any that goes on: the worker's log says what failed.",
            HEADING,
            (Query(increase("tidemill_environment_faults_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Prompt tokens of later turns",
            "short",
            "Prompt tokens of turns two and later a second: from the prefix cache, and computed again.",
            "Many computed: the cache is too small for the sessions held, or weights change often.",
            HEADING,
            (Query(per_s("tidemill_session_later_prompt_tokens_total", "source"), "{{source}}"),),
            "stacked",
        ),
    ),
)
