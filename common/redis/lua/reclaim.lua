-- Take over what silent consumers hold, with the number of times each entry was delivered.
-- KEYS: input stream.  ARGV: group, consumer, idle milliseconds, count, cursor, latest time that it can be.
-- Returns the server's time, the next cursor, then (id, fields, deliveries) for each entry taken; and nothing
-- but the time where the server's clock has jumped ahead: leases look expired then that are not.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if tonumber(ARGV[6]) > 0 and now > tonumber(ARGV[6]) then
  return {now}
end
-- A delivery from the future is one from before the clock was set back. As it stands, it would not expire before
-- the clock has caught up: its lease begins now. Where its holder lives, this renews it once.
for _, held in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[5], '+', 10 * ARGV[4])) do
  if held[3] <= 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], held[2], 0, held[1], 'JUSTID')
  end
end
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
return {now, reply[1], taken}
