-- Set fields of the run's state, if the last commit is there: after a failover the server may lack it.
-- Atomic against a failover between the two.
-- KEYS: commits, state.
-- ARGV: last_commit_id, fields... (name, value).
-- Returns 1 set, or 0.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
  if info.err then
    return string.find(info.err, 'no such key', 1, true) and 0 or info
  end
  for i = 1, #info, 2 do
    -- Equal where the commit was deleted by hand. A greater id proves nothing: another writer may have used it.
    if info[i] == 'last-generated-id' and info[i + 1] ~= ARGV[1] then
      return 0
    end
  end
end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 1
