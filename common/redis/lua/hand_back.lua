-- Give held entries back at once: the next reclaim takes them. This delivery counts, unless it is subtracted.
-- They get another holder's name: a renewal by their former holder, which may be under way, would make them look
-- held again for a whole lease.
-- Atomic against a worker that has taken an entry over meanwhile: it keeps the entry.
-- KEYS: stream.
-- ARGV: group, consumer, idle_ms, num_subtracted, holder, entry_ids...
-- `num_subtracted` deliveries are subtracted, and `holder` is the new one.
for i = 6, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    -- A ticket with a published sample counts 0 deliveries (publish_sample.lua): none can be subtracted.
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[i],
      'IDLE', ARGV[3], 'RETRYCOUNT', math.max(held[1][4], 1) - ARGV[4], 'JUSTID')
  end
end
return 1
