-- Set fields of the run's state, if the commits go as far as they should: a server that takes over from another
-- may lack the last of them. Atomic against a failover between the two.
-- KEYS: commits, state.  ARGV: id of the last commit, then names and values.  Returns 1 set, or 0.
local function number(id)
  return tonumber(string.match(id, '^%d+'))
end
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
if info.err then
  return string.find(info.err, 'no such key', 1, true) and 0 or info
end
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' and number(info[i + 1]) < number(ARGV[1]) then
    return 0
  end
end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 1
