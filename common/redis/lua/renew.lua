-- Renew the leases that this consumer still holds.  JUSTID leaves the delivery count alone.
-- Atomic against a worker that takes an entry over between check and claim: XCLAIM alone would take it back.
-- KEYS: stream.
-- ARGV: group, consumer, entry_ids...
-- Returns the ids that are no longer held.
local lost = {}
for i = 3, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
