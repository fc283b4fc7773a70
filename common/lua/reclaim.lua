-- Take over what silent consumers hold, with the number of times each entry was delivered.
-- KEYS: input stream.  ARGV: group, consumer, idle milliseconds, count, cursor.
-- Returns the next cursor, then (id, fields, deliveries) for each entry taken.
local reply = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[5], 'COUNT', ARGV[4], 'JUSTID')
local taken = {}
for _, id in ipairs(reply[2]) do
  local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id)[1]
  if entry then
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2])
    taken[#taken + 1] = {id, entry[2], pending[1][4]}
  else
    -- The entry was trimmed while it was held. Redis 6.2 would keep it pending for ever.
    redis.call('XACK', KEYS[1], ARGV[1], id)
  end
end
return {reply[1], taken}
