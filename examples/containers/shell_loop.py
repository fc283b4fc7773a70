"""A small agent for verifiers: one tool, a shell. It needs nothing in the box but Python: no package index.

`--env.agent.harness.id shell_loop`; verifiers' own `bash` does more, and installs its packages in each box.
"""

import verifiers.v1 as vf

__all__ = ["ShellLoop"]

PROGRAM = """
import json, subprocess, sys, tempfile, urllib.request

url, key, model, prompt, timeout_s = sys.argv[1:]
command = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
shell = {"name": "shell", "description": "Run a command with bash.", "parameters": command}
messages = [{"role": "user", "content": prompt}]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
while True:
    body = {"model": model, "messages": messages, "tools": [{"type": "function", "function": shell}]}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages.append(message)
    calls = message.get("tool_calls")
    if not calls:
        break
    for call in calls:
        try:
            line = json.loads(call["function"]["arguments"])["command"]
            limited = ["timeout", "-k", "1", timeout_s, "bash", "-c", line]
            # Not a pipe: a job that the command leaves in the background would hold it open.
            with tempfile.TemporaryFile() as output:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                ended = subprocess.run(limited, **streams)
                output.seek(max(0, output.seek(0, 2) - 8000))
                answer = output.read().decode(errors="replace") + "[exit code %d]" % ended.returncode
        except (ValueError, KeyError, TypeError) as error:
            answer = "the call is no JSON with a command: %r" % error
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
"""


class ShellLoopConfig(vf.HarnessConfig):
    """Settings of the agent."""

    command_timeout_s: int = 60


class ShellLoop(vf.Harness[ShellLoopConfig]):
    """Asks the model, runs what it calls, until it calls nothing."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the agent in the box."""
        _, prompt = self.resolve_text_prompt(data)
        limit = str(self.config.command_timeout_s)
        arguments = [endpoint, secret, ctx.model, prompt or "", limit]
        return await runtime.run_program(["python3", "-I", "-c", PROGRAM, *arguments], {})
