-- Append numbered entries, if the stream still ends where the caller saw it end: Redis may have lost its tail
-- since, and an earlier number cannot be appended after a later one.
-- Atomic against a failover between check and append, and against another trainer that appends meanwhile.
-- KEYS: stream, marks?.
-- ARGV: last, schema, mark_field?, mark?, entries... (id, payload).
-- With a hash of marks, the append depends on its field `mark_field`. Entries have ascending ids.
-- Returns 1 appended; 0 where the stream ends elsewhere, or -1 where the mark is gone: nothing is appended.
local last = '0-0'
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
if not info.err then
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      last = info[i + 1]
    end
  end
elseif not string.find(info.err, 'no such key', 1, true) then
  return info
end
if last ~= ARGV[1] then
  return 0
end
local first = 3
if KEYS[2] then
  if redis.call('HGET', KEYS[2], ARGV[3]) ~= ARGV[4] then
    return -1
  end
  first = 5
end
for i = first, #ARGV, 2 do
  -- Ids ascend from above `last`: if Redis refused one, those before it would stay, because nothing undoes them.
  redis.call('XADD', KEYS[1], ARGV[i], 'v', ARGV[2], 'p', ARGV[i + 1])
end
return 1
