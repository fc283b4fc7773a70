-- Take over what silent consumers hold, with the number of times each entry was delivered.
-- KEYS: input stream.  ARGV: group, consumer, idle milliseconds, count, cursor.
-- Returns the next cursor, then (id, fields, deliveries) for each entry taken.
local reply = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[5], 'COUNT', ARGV[4])
local taken = {}
for _, entry in ipairs(reply[2]) do
  if entry and entry[2] then
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1, ARGV[2])
    taken[#taken + 1] = {entry[1], entry[2], pending[1] and pending[1][4] or 1}
  end
end
return {reply[1], taken}
