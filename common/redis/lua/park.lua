-- Set how often held entries count as delivered, and renew their leases.  An entry that waits to be worked on does
-- not count as delivered: a worker that takes it over after its holder's death knows that it was not begun.
-- Atomic against a worker that takes an entry over: this one must not take it back.
-- KEYS: stream.
-- ARGV: group, consumer, entries... (entry_id, num_deliveries).
-- Returns ids no longer held.
local lost = {}
for i = 3, #ARGV, 2 do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'RETRYCOUNT', ARGV[i + 1], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
