"""Import edges between the packages that are proposed, and the cycles they make. Usage: python rooms.py ROOT"""
import ast, collections, sys
from pathlib import Path
root = Path(sys.argv[1]); pkg = root / "kvserve"
MOVE = {
 "process":"app/process","app":"app/app","wiring":"app/wiring","catalogue":"app/catalogue","loading":"app/loading",
 "roster":"app/model_pool","stage":"app/model_swap","forgetting":"app/forgetting","call_forms":"app/call_forms",
 "pipeline":"requests/pipeline","running":"requests/running","deferred":"requests/deferred","agent_turns":"requests/agent_turns","call_ids":"requests/call_ids",
 "prewarming":"warming/prewarming","next_turns":"warming/speculative_prefill","foresight":"warming/next_turn_predictor",
 "sessions.habits":"warming/client_behaviour",
 "seeing":"observe/requests","watching":"observe/snapshot","reports":"observe/reports",
 "flags":"settings/flags","values":"settings/values","env_file":"settings/env_file","first_checks":"settings/first_checks",
 "config":"config","core":"core","errors":"errors","keeping":"core/keeping",
}
for s in ("explanation","explanation_place","explanation_raw","explanation_words","explanations","difference","raw_prompts"):
    MOVE["sessions."+s] = "explain/"+s
for s in ("activity","bars","log","metrics","terminal","trace"):
    MOVE["telemetry."+s] = "observe/"+s
MOVE["telemetry"]="observe/__init__"
mods = {}
for p in pkg.rglob("*.py"):
    m = p.relative_to(pkg).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    if m and m != "__init__": mods[m] = p
def room(m):
    new = MOVE.get(m, m.replace(".", "/"))
    return new.split("/")[0] if "/" in new else (new if new in ("core","errors","config") else new.split("/")[0])
SYMBOLS = {("telemetry.terminal","RequestFacts"):"requests",("telemetry.terminal","LengthLimit"):"requests",("telemetry.activity","RunningFacts"):"requests",
 ("running","Observer"):"requests",("roster","RosterStatus"):"core",("telemetry.activity","Watched"):"requests",("telemetry.activity","Activity"):"observe",
 ("telemetry.bars","Bars"):"observe"}
MOVE["web.port_holder"]="settings/ports"; MOVE["engine.config_file"]="settings/model_config"; MOVE["canonical.settable"]="settings/rules"; MOVE["proxy.settings"]="settings/proxy"
def imports(p):
    for n in ast.walk(ast.parse(p.read_text("utf-8"))):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("kvserve"):
            base = n.module.removeprefix("kvserve").lstrip(".")
            for a in n.names:
                full = f"{base}.{a.name}".lstrip(".")
                if full not in mods and (base,a.name) in SYMBOLS: yield ("room",SYMBOLS[base,a.name])
                else: yield full if full in mods else base
        elif isinstance(n, ast.Import):
            for a in n.names:
                if a.name.startswith("kvserve."): yield a.name[8:]
edges = collections.defaultdict(lambda: collections.defaultdict(list))
for m, p in mods.items():
    for t in imports(p):
        r = t[1] if isinstance(t,tuple) else (room(t) if t else None)
        if r and room(m) != r: edges[room(m)][r].append((m, t if not isinstance(t,tuple) else t[1]))
for a in sorted(edges): print(a, "->", ", ".join(f"{b}({len(v)})" for b, v in sorted(edges[a].items())))
print("\ntwo-way pairs:")
for a in edges:
    for b in edges[a]:
        if a < b and a in edges.get(b, {}):
            print(f"  {a} <-> {b}: ", sorted(set(edges[a][b])), "|", sorted(set(edges[b][a])))
# strongly connected components
idx, low, st, on, out, cnt = {}, {}, [], set(), [], [0]
sys.setrecursionlimit(10000)
def dfs(v):
    idx[v]=low[v]=cnt[0]; cnt[0]+=1; st.append(v); on.add(v)
    for w in edges.get(v, {}):
        if w not in idx: dfs(w); low[v]=min(low[v],low[w])
        elif w in on: low[v]=min(low[v],idx[w])
    if low[v]==idx[v]:
        c=[]
        while True:
            w=st.pop(); on.discard(w); c.append(w)
            if w==v: break
        if len(c)>1: out.append(c)
for v in list(edges):
    if v not in idx: dfs(v)
print("cycles (components):", out)
